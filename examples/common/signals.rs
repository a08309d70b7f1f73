//! How a server hears that it is to stop.

use tokio::signal;

/// Ends when the process is asked to stop. Signals are caught from this call on, not from the first
/// poll, so that none that comes after "listening" ends the process at once.
pub(crate) fn asked_to_stop() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    #[cfg(unix)]
    {
        use signal::unix::{SignalKind, signal};
        let mut interrupted = signal(SignalKind::interrupt())?;
        let mut terminated = signal(SignalKind::terminate())?;
        Ok(async move {
            tokio::select! {
                _ = interrupted.recv() => {}
                _ = terminated.recv() => {}
            }
        })
    }
    #[cfg(not(unix))]
    {
        let mut interrupted = signal::windows::ctrl_c()?;
        Ok(async move {
            interrupted.recv().await;
        })
    }
}
