//! Model of limits that span cells (docs/CELLS.md). The test visits every state of few cells and small amounts, with every loss,
//! delay and repetition of messages.

mod mover;
mod protocol;
mod world;

use std::{collections::HashSet, sync::LazyLock};

use self::{
    mover::Moving,
    protocol::{Home, Mistake, Share},
    world::{Bounds, World, explore},
};

/// Number of rounds after which the shares match the demand: one round reclaims, the next one gives.
const ROUNDS: usize = 2;

static TWO_CELLS: LazyLock<HashSet<World<2>>> = LazyLock::new(|| reached(2));
static THREE_CELLS: LazyLock<HashSet<World<3>>> = LazyLock::new(|| reached(1));

/// Number of changes of each cell: two, or the value of the variable.
fn bounds(step: u8) -> Bounds {
    let changes = std::env::var("LINKIS_RM_SHARES").map_or(2, |changes| changes.parse().unwrap());
    Bounds { maximum: 3, changes, step }
}

/// Visits every reachable state, and asserts its invariants.
fn reached<const CELLS: usize>(step: u8) -> HashSet<World<CELLS>> {
    let (seen, wrong) = explore(bounds(step), None, |world| !world.is_well());
    assert_eq!(wrong, None);
    eprintln!("{CELLS} cells: {} states", seen.len());
    seen
}

#[test]
fn cell_shares_after_any_crash_keep_limit() {
    let all_are_held = |shares: &[Share]| shares.iter().all(|share| share.held > 0 && share.number > 1);
    assert!(TWO_CELLS.iter().any(|world| all_are_held(&world.shares)));
    assert!(THREE_CELLS.iter().any(|world| all_are_held(&world.shares)));
}

#[test]
fn cell_shares_without_any_rule_exceed_limit() {
    for mistake in [
        Mistake::GivesMoreThanThereIs,
        Mistake::GrowsInTheCellFirst,
        Mistake::ShrinksAtHomeFirst,
        Mistake::GivesBackWhatIsHeld,
        Mistake::CellIgnoresNumbers,
        Mistake::HomeIgnoresNumbers,
    ] {
        let (_, wrong) = explore::<2>(bounds(1), Some(mistake), World::is_beyond);
        assert!(wrong.is_some(), "{mistake:?}");
    }
}

#[test]
fn cell_shares_after_crashes_converge_in_two_rounds() {
    assert_all_granted(&TWO_CELLS);
    assert_all_granted(&THREE_CELLS);
}

/// Asserts the result of rounds from the rows alone, with all messages lost, for every set of live cells and every shortage.
fn assert_all_granted<const CELLS: usize>(worlds: &HashSet<World<CELLS>>) {
    let rows: HashSet<_> = worlds.iter().map(|world| (world.home, world.shares)).collect();
    for (home, shares) in rows {
        for lacks in each::<CELLS>(2) {
            for lives in each::<CELLS>(1) {
                assert_granted(home, shares, lives.map(|lives| lives == 1), lacks);
            }
        }
    }
}

/// Returns every list of numbers from 0 to `most`.
fn each<const CELLS: usize>(most: u8) -> Vec<[u8; CELLS]> {
    let mut rows = vec![[0; CELLS]];
    for cell in 0..CELLS {
        let with = |row: [u8; CELLS], number| std::array::from_fn(|at| if at == cell { number } else { row[at] });
        rows = rows.into_iter().flat_map(|row| (0..=most).map(move |number| with(row, number))).collect();
    }
    rows
}

/// Asserts the result of rounds without other events.
fn assert_granted<const CELLS: usize>(
    home: Home<CELLS>,
    shares: [Share; CELLS],
    lives: [bool; CELLS],
    lacks: [u8; CELLS],
) {
    let living = || (0..CELLS).filter(|cell| lives[*cell]);
    // An unreachable cell keeps its share; the other cells keep theirs.
    let kept = |cell: usize| if lives[cell] { shares[cell].held } else { home.given[cell].amount };
    let taken: u8 = (0..CELLS).map(kept).sum();
    let wanted: u8 = living().map(|cell| lacks[cell]).sum();
    let room = wanted.min(home.maximum.saturating_sub(taken));

    let mut moving = Moving { home, shares, lives, lacks };
    (0..ROUNDS).for_each(|_| moving.round());
    let granted: u8 = living().map(|cell| moving.shares[cell].held - shares[cell].held).sum();
    // A lowered limit can be granted until its shares are taken back.
    let is_lowered = home.total() > home.maximum;
    let all = format!("{granted} of {room}: {home:?} {shares:?} {lives:?} {lacks:?}");
    assert!(granted == room || is_lowered && granted > room, "{all}");

    let settled = moving.clone();
    moving.round();
    assert_eq!(moving, settled, "shares go to and fro: {all}");
}
