//! The mover: moves shares between cells, from the rows alone. It can end at any step, and another mover continues.

use super::protocol::{Home, Message, Share};

/// Home and the live cells. Other cells keep their shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moving<const CELLS: usize> {
    pub home: Home<CELLS>,
    pub shares: [Share; CELLS],
    pub lives: [bool; CELLS],
    /// Requested and not yet granted amount of each cell.
    pub lacks: [u8; CELLS],
}

impl<const CELLS: usize> Moving<CELLS> {
    /// Runs one round: finishes the changes in progress, then begins and finishes at most one change for each cell.
    pub fn round(&mut self) {
        self.finish();
        self.begin();
        self.finish();
    }

    fn living(&self) -> impl Iterator<Item = usize> + use<CELLS> {
        let lives = self.lives;
        (0..CELLS).filter(move |cell| lives[*cell])
    }

    /// A cell with a larger share grants waiting requests in the same commit, so that no later change takes the share.
    fn finish(&mut self) {
        for cell in self.living() {
            if let Some(Message::Make(number, change)) = self.home.given[cell].order()
                && let Some(Message::Made(number, amount)) = self.shares[cell].make(number, change, None)
            {
                self.home.given[cell].end(number, amount, None);
            }
            let granted = self.shares[cell].idle().min(self.lacks[cell]);
            self.shares[cell].held += granted;
            self.lacks[cell] -= granted;
        }
    }

    /// Gives free amounts to cells that lack them, and reclaims from other cells what is short or above the limit.
    fn begin(&mut self) {
        let mut short = self.home.total().saturating_sub(self.home.maximum);
        for cell in self.living() {
            let by = self.lacks[cell].min(self.home.free());
            if by > 0 {
                assert!(self.home.grow(cell, by, None));
            }
            short += self.lacks[cell] - by;
        }
        for cell in self.living() {
            let by = self.shares[cell].idle().min(short);
            if by > 0 {
                assert!(self.home.shrink(cell, by, None));
                short -= by;
            }
        }
    }
}
