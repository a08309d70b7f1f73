//! Which parts of a JSON body count. In: the JSON Pointers of a setting; out: a [`Selection`],
//! which is walked along with the body. Next, the digest of the body takes in what is selected.

use std::{collections::BTreeMap, fmt};

use crate::digest::{Digest, Framed};

/// The parts of a JSON document that count, chosen by JSON Pointers (RFC 6901).
#[derive(Clone)]
pub(crate) struct Selection {
    kind: Kind,
    pointers: Vec<Pointer>,
    /// The tree of all pointers. The first node is the document; one without children is where a
    /// pointer ends.
    nodes: Vec<Node>,
    id: Digest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Only,
    Except,
}

/// A pointer as it was written, which is the only way to write it, and its tokens without escapes.
#[derive(Clone)]
struct Pointer {
    written: String,
    tokens: Vec<String>,
}

/// Where the children are among all nodes, by the name of a member. Those that an element can have
/// too are there a second time, by its index.
#[derive(Clone, Default)]
pub(crate) struct Node {
    members: BTreeMap<Box<[u8]>, usize>,
    elements: BTreeMap<usize, usize>,
}

impl Selection {
    /// What the pointers point at, and nothing else.
    pub(crate) fn only<P: AsRef<str>>(
        pointers: impl IntoIterator<Item = P>,
    ) -> Result<Self, String> {
        let pointers = parse_all(pointers)?;
        if pointers.is_empty() {
            return Err("without any pointer, no body would differ from another".to_owned());
        }
        Ok(Self::new(Kind::Only, pointers))
    }

    /// All but what the pointers point at; `None` if there are none.
    pub(crate) fn except<P: AsRef<str>>(
        pointers: impl IntoIterator<Item = P>,
    ) -> Result<Option<Self>, String> {
        let pointers = parse_all(pointers)?;
        if pointers.iter().any(|pointer| pointer.tokens.is_empty()) {
            return Err(
                "\"\" is the whole body, and without it none would differ from another".to_owned()
            );
        }
        Ok((!pointers.is_empty()).then(|| Self::new(Kind::Except, pointers)))
    }

    fn new(kind: Kind, mut pointers: Vec<Pointer>) -> Self {
        // The same selection has one id, however it is put: what lies inside another part adds
        // nothing. In this order it comes right after that one.
        pointers.sort_unstable_by(|a, b| a.tokens.cmp(&b.tokens));
        pointers.dedup_by(|inside, outside| inside.tokens.starts_with(&outside.tokens));
        let mut id = Framed::new("tower-idempotency selection 1");
        id.number(usize::from(kind == Kind::Only));
        let mut nodes = vec![Node::default()];
        for pointer in &pointers {
            id.field(pointer.written.as_bytes());
            let mut node = 0;
            for token in &pointer.tokens {
                let next = nodes.len();
                let child = *nodes[node].members.entry(token.as_bytes().into()).or_insert(next);
                if child == next {
                    nodes.push(Node::default());
                }
                if let Some(index) = element_index(token) {
                    nodes[node].elements.insert(index, child);
                }
                node = child;
            }
        }
        Self { kind, pointers, nodes, id: id.finish() }
    }

    /// Differs from that of every selection of other parts.
    pub(crate) fn id(&self) -> &Digest {
        &self.id
    }

    /// What counts of the whole document.
    pub(crate) fn root(&self) -> Part<'_> {
        self.at(Some(&0))
    }

    fn at(&self, node: Option<&usize>) -> Part<'_> {
        let node = node.map(|node| &self.nodes[*node]);
        match (node, self.kind) {
            (Some(node), _) if !node.members.is_empty() => Part::Inside(self, node),
            (Some(_), Kind::Only) | (None, Kind::Except) => Part::All,
            (Some(_), Kind::Except) | (None, Kind::Only) => Part::Nothing,
        }
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pointers: Vec<_> = self.pointers.iter().map(|pointer| &pointer.written).collect();
        match self.kind {
            Kind::Only => f.debug_tuple("Only"),
            Kind::Except => f.debug_tuple("Except"),
        }
        .field(&pointers)
        .finish()
    }
}

/// What counts of one value of a document.
#[derive(Clone, Copy)]
pub(crate) enum Part<'s> {
    All,
    Nothing,
    /// It depends on what is inside.
    Inside(&'s Selection, &'s Node),
}

impl Part<'_> {
    /// What counts of the member with this name, in UTF-8.
    #[inline]
    pub(crate) fn of_member(self, name: &[u8]) -> Self {
        match self {
            Self::Inside(selection, node) => selection.at(node.members.get(name)),
            all_or_nothing => all_or_nothing,
        }
    }

    /// What counts of the element with this index.
    #[inline]
    pub(crate) fn of_element(self, index: usize) -> Self {
        match self {
            Self::Inside(selection, node) => selection.at(node.elements.get(&index)),
            all_or_nothing => all_or_nothing,
        }
    }

    /// Does the value count even if nothing inside it does?
    pub(crate) fn by_itself(self) -> bool {
        match self {
            Self::All => true,
            Self::Nothing => false,
            Self::Inside(selection, _) => selection.kind == Kind::Except,
        }
    }

    pub(crate) fn is_inside(self) -> bool {
        matches!(self, Self::Inside(..))
    }
}

fn parse_all<P: AsRef<str>>(pointers: impl IntoIterator<Item = P>) -> Result<Vec<Pointer>, String> {
    pointers.into_iter().map(|pointer| parse(pointer.as_ref())).collect()
}

fn parse(written: &str) -> Result<Pointer, String> {
    let refuse = |why| Err(format!("{written:?} is not a JSON Pointer: {why}"));
    let mut tokens = written.split('/');
    if tokens.next() != Some("") {
        return refuse("it has to begin with \"/\"");
    }
    if !written.split('~').skip(1).all(|rest| rest.starts_with(['0', '1'])) {
        return refuse("\"~\" in a name is written \"~0\", and \"/\" is written \"~1\"");
    }
    // In this order, or "~01" would be read as "/".
    let tokens = tokens.map(|token| token.replace("~1", "/").replace("~0", "~")).collect();
    Ok(Pointer { written: written.to_owned(), tokens })
}

/// The index that a token is in an array: decimal digits without leading zeros. `-` and an index
/// beyond all memory point at no element.
fn element_index(token: &str) -> Option<usize> {
    let is_index = token == "0" || !token.starts_with(['0', '+']);
    token.parse().ok().filter(|_| is_index)
}

#[cfg(test)]
mod tests;
