//! Whose key is it? In: the head of a request; out: its [`Scope`], the namespace in which a key
//! is unique, or none (403). Scope and key together are the operation id; next the request's body
//! is read.

use std::fmt;

use bytes::Bytes;
use http::{HeaderName, request::Parts};

use crate::digest::Framed;

/// The namespace in which a key is unique: a tenant, a profile, a user.
///
/// The server decides it, from what it has verified itself; never the client's word alone. A
/// caller only ever sees records of its own scope.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Scope(Bytes);

impl Scope {
    /// A scope of one part, such as a tenant's id.
    #[must_use]
    pub fn new(name: impl AsRef<[u8]>) -> Self {
        Self::from_parts([name])
    }

    /// A scope of several parts. Each is kept behind its length, so `["a:b", "c"]` and
    /// `["a", "b:c"]` are two scopes.
    #[must_use]
    pub fn from_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut bytes = Vec::new();
        for part in parts {
            let part = part.as_ref();
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part);
        }
        Self(bytes.into())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The name of a scope that stores see: a digest of it. All that it is for is to tell one scope's
/// entries from another's.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScopeId([u8; 32]);

impl ScopeId {
    /// The id of `scope`.
    #[must_use]
    pub fn new(scope: &Scope) -> Self {
        let mut framed = Framed::new("tower-idempotency scope 1");
        framed.field(scope.as_bytes());
        Self(framed.finish())
    }

    /// The id as bytes, for a store to keep.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for ScopeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The digest of a guessable name can be guessed from.
        f.write_str("ScopeId(..)")
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A scope may be made of a credential.
        f.write_str("Scope(..)")
    }
}

/// What says whose a request's key is.
pub(crate) type ScopeOf = dyn Fn(&Parts) -> Option<Scope> + Send + Sync;

/// The scope is what an outer layer (authentication) put into the request's extensions as a `T`.
///
/// A request without one is refused with 403: if all keyed requests are, the layer is outside the
/// authentication, and belongs inside. For a `T` that is not text, pass a closure to
/// [`IdempotencyLayer::new`](crate::IdempotencyLayer::new) instead.
pub fn from_extension<T>() -> impl Fn(&Parts) -> Option<Scope> + Clone + Send + Sync + 'static
where
    T: AsRef<str> + Clone + Send + Sync + 'static,
{
    |parts| parts.extensions.get::<T>().map(|name| Scope::new(name.as_ref()))
}

/// The scope is the value of a request header.
///
/// **Unsafe where a client can set that header itself**: it then names the scope it wants and
/// reads the answers of others. Right only behind a gateway that has authenticated the caller and
/// overwrites the header. Do not use `Authorization`: a refreshed token is another scope, and the
/// retry runs again. A request with no such header, or with several lines of it, is refused with
/// 403.
pub fn from_header(
    name: HeaderName,
) -> impl Fn(&Parts) -> Option<Scope> + Clone + Send + Sync + 'static {
    move |parts| {
        let mut lines = parts.headers.get_all(&name).iter();
        match (lines.next(), lines.next()) {
            (Some(value), None) => Some(Scope::new(value)),
            _ => None,
        }
    }
}

/// Everybody shares one scope: for a service with a single caller, or whose keys are secrets that
/// no two callers share. Whoever guesses a key reads its answer.
pub fn single_tenant() -> impl Fn(&Parts) -> Option<Scope> + Clone + Send + Sync + 'static {
    |_| Some(Scope(Bytes::new()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(lines: &[&str]) -> Parts {
        let mut request = Request::builder();
        for line in lines {
            request = request.header("x-tenant", *line);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn parts_of_a_scope_never_run_into_each_other() {
        assert_ne!(Scope::from_parts(["a:b", "c"]), Scope::from_parts(["a", "b:c"]));
        assert_ne!(Scope::from_parts(["ab", ""]), Scope::from_parts(["a", "b"]));
        assert_ne!(Scope::from_parts(["ab"]), Scope::from_parts(["ab", ""]));
        assert_eq!(Scope::from_parts(["a", "b"]), Scope::from_parts(["a", "b"]));
    }

    #[test]
    fn a_header_names_the_scope_only_when_there_is_one_line() {
        let scope = from_header(HeaderName::from_static("x-tenant"));
        assert_eq!(scope(&parts(&["a"])), Some(Scope::new("a")));
        assert_eq!(scope(&parts(&[])), None);
        assert_eq!(scope(&parts(&["a", "a"])), None);
    }

    #[test]
    fn an_extension_names_the_scope_and_its_absence_is_none() {
        let scope = from_extension::<String>();
        let mut parts = parts(&[]);
        assert_eq!(scope(&parts), None);
        parts.extensions.insert("tenant".to_owned());
        assert_eq!(scope(&parts), Some(Scope::new("tenant")));
    }

    #[test]
    fn a_scope_is_not_printed() {
        assert_eq!(format!("{:?}", Scope::new("secret")), "Scope(..)");
    }
}
