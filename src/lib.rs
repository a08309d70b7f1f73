//! Makes retries safe: runs a request once per idempotency key and replays its first answer.
