//! What a store can be asked, as the doubles of stores name it.

/// A call of the store, or of one of its claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    Lookup,
    Claim,
    Withdraw,
    Expire,
    Retain,
    Complete,
    Release,
    Hold,
}

impl Call {
    pub fn is_settlement(self) -> bool {
        matches!(self, Self::Complete | Self::Release | Self::Hold)
    }
}
