//! Chance that comes out the same again: everything that a run does is drawn from its seed.

/// Throws of one key's dice (`SplitMix64`).
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64, number: usize) -> Self {
        Self(seed ^ (number as u64).wrapping_mul(0xD1B5_4A32_D192_ED03))
    }

    fn throw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.throw() % end as u64).unwrap()
    }

    pub(crate) fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    pub(crate) fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}
