//! Shares of a limit, by the rules of `docs/CELLS.md`: the rows, and the changes that one commit may make.
//!
//! Never: changes more than one row of home, or one row of a cell, in one function; no transaction of the service may.

/// Home's row of a cell: the share of the limit that home gave it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Given {
    pub amount: u8,
    /// State of the last completed change.
    pub number: u8,
    pub under_way: Option<Change>,
}

/// A change that home has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Change {
    /// The cell gets this larger share.
    GrowTo(u8),
    /// The cell must return this amount, or the idle part of it.
    ShrinkBy(u8),
}

/// A cell's row: the share by which the cell decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Share {
    pub amount: u8,
    pub held: u8,
    /// State of the last applied change.
    pub number: u8,
}

/// A message between home and a cell. It can be lost, late, repeated, or overtaken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Message {
    /// To the cell: the change with this number.
    Make(u8, Change),
    /// To home: the share of the cell after the change with this number.
    Made(u8, u8),
}

/// A planted mistake, which the model must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// Home gives an amount that it does not have.
    GivesMoreThanThereIs,
    /// A share grows in the cell before home has committed it.
    GrowsInTheCellFirst,
    /// Home reclaims before the cell has returned the amount.
    ShrinksAtHomeFirst,
    /// A cell returns an amount that its tickets use.
    GivesBackWhatIsHeld,
    /// A cell applies a change whose number is not the next.
    CellIgnoresNumbers,
    /// Home accepts a reply to an earlier change.
    HomeIgnoresNumbers,
}

/// All rows of home, and the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Home<const CELLS: usize> {
    pub maximum: u8,
    pub given: [Given; CELLS],
}

impl<const CELLS: usize> Home<CELLS> {
    pub fn total(&self) -> u8 {
        self.given.iter().map(|given| given.amount).sum()
    }

    /// Returns the amount without a cell: zero while a lowered limit drains.
    pub fn free(&self) -> u8 {
        self.maximum.saturating_sub(self.total())
    }

    /// Begins to give a cell an amount, if home has it.
    pub fn grow(&mut self, cell: usize, by: u8, mistake: Option<Mistake>) -> bool {
        let is_free = by <= self.free() || mistake == Some(Mistake::GivesMoreThanThereIs);
        let given = &mut self.given[cell];
        if !is_free || given.under_way.is_some() {
            return false;
        }
        given.under_way = Some(Change::GrowTo(given.amount + by));
        if mistake != Some(Mistake::GrowsInTheCellFirst) {
            given.amount += by;
        }
        true
    }

    /// Begins to reclaim an amount from a cell.
    pub fn shrink(&mut self, cell: usize, by: u8, mistake: Option<Mistake>) -> bool {
        let given = &mut self.given[cell];
        if given.amount == 0 || given.under_way.is_some() {
            return false;
        }
        given.under_way = Some(Change::ShrinkBy(by));
        if mistake == Some(Mistake::ShrinksAtHomeFirst) {
            given.amount = given.amount.saturating_sub(by);
        }
        true
    }
}

impl Given {
    /// Returns the message to the cell, which any reader of the row can send again.
    pub fn order(&self) -> Option<Message> {
        self.under_way.map(|change| Message::Make(self.number + 1, change))
    }

    /// Records the end of a change, and the share of the cell.
    pub fn end(&mut self, number: u8, amount: u8, mistake: Option<Mistake>) {
        let is_awaited = self.under_way.is_some() && number == self.number + 1;
        if is_awaited || mistake == Some(Mistake::HomeIgnoresNumbers) {
            *self = Self { amount, number: self.number.max(number), under_way: None };
        }
    }
}

impl Share {
    pub fn idle(&self) -> u8 {
        self.amount.saturating_sub(self.held)
    }

    /// Applies a change if it is the next one, and returns the share of the cell, also for the last one again. An older change
    /// gets no reply.
    pub fn make(&mut self, number: u8, change: Change, mistake: Option<Mistake>) -> Option<Message> {
        if number == self.number + 1 || mistake == Some(Mistake::CellIgnoresNumbers) {
            self.number = self.number.max(number);
            self.amount = match change {
                Change::GrowTo(amount) => amount,
                Change::ShrinkBy(by) if mistake == Some(Mistake::GivesBackWhatIsHeld) => self.amount.saturating_sub(by),
                Change::ShrinkBy(by) => self.amount.saturating_sub(by).max(self.held),
            };
        }
        (number == self.number).then_some(Message::Made(number, self.amount))
    }
}
