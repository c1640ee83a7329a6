//! Invariants of the order, by their numbers in the reference. They are stated on the state alone, without the functions of
//! `rm_model::order` that decide classes and turns; only positions are taken from there, because they are checked.

use rm_model::order::Class;

use super::{
    setting::{Amounts, DIMENSIONS, KEYS, Kind},
    world::{Event, Model, Phase, Seconds, Waiting, World, add},
};

fn expect(holds: bool, broken: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(broken()) }
}

/// Own order: entry time less head start, then the number.
fn own_order(model: &Model<'_>, request: usize, entered: Seconds) -> (Seconds, usize) {
    (entered - Seconds::from(model.setting.requests[request].priority), request)
}

/// The keys at which a request waits, as its user's turns count them: all EMs are one key for requests that name none.
fn turns_at(model: &Model<'_>, request: usize, waiting: &Waiting) -> Vec<usize> {
    let is_em = |key: usize| model.setting.kinds[key] == Kind::Em;
    let any_em = model.setting.requests[request].any_em;
    waiting.short.iter().map(|key| if any_em && is_em(key) { KEYS } else { key }).collect()
}

fn shares_key(model: &Model<'_>, one: (usize, &Waiting), two: (usize, &Waiting)) -> bool {
    let other = turns_at(model, two.0, two.1);
    turns_at(model, one.0, one.1).iter().any(|key| other.contains(key))
}

/// Whether the amounts fit together in every dimension of a request.
fn fits(model: &Model<'_>, amounts: Amounts, sum: &Amounts) -> bool {
    (0..KEYS).all(|key| {
        (0..DIMENSIONS).all(|at| amounts[key][at] == 0 || sum[key][at] + amounts[key][at] <= model.setting.max[key][at])
    })
}

/// Whether a request fits at a key beside the amounts of others.
fn fits_beside<'a>(
    model: &Model<'_>,
    world: &World,
    (request, em): (usize, usize),
    key: usize,
    others: impl Iterator<Item = (usize, &'a Waiting)>,
) -> bool {
    let (mut sum, mut here) = (model.held(world), Amounts::default());
    others.for_each(|(other, its)| add(&mut sum, model.setting.requests[other].amounts_on(its.em)));
    here[key] = model.setting.requests[request].amounts_on(em)[key];
    fits(model, here, &sum)
}

/// Whether a request is within the guarantees of its scopes, beside what they hold and the entitled requests that `counts` selects.
fn is_within(model: &Model<'_>, world: &World, request: usize, counts: impl Fn(usize, &Waiting) -> bool) -> bool {
    let entitled = || world.present().filter(|(other, its)| *other != request && its.class == Class::Entitled);
    let mut sum = model.held(world);
    let others = entitled().filter(|(other, its)| counts(*other, its)).map(|(other, _)| other);
    others.chain([request]).for_each(|counted| add(&mut sum, model.setting.requests[counted].amounts));
    let (amounts, guarantee) = (&model.setting.requests[request].amounts, &model.setting.guarantee);
    let amounts = amounts.iter().flatten().zip(guarantee.iter().flatten()).zip(sum.iter().flatten());
    let mut guaranteed = amounts.filter(|((amount, guarantee), _)| **amount > 0 && **guarantee > 0).peekable();
    guaranteed.peek().is_some() && guaranteed.all(|((_, guarantee), sum)| sum <= guarantee)
}

/// Invariants 1 to 4, 6, 7 and 10.
pub fn check_state(model: &Model<'_>, world: &World) -> Result<(), String> {
    check_ring(model, world)?;
    check_heads(model, world)?;
    for (request, waiting) in world.present() {
        let own = || world.present().filter(move |(other, _)| model.is_own(*other, request));
        let earlier = |(other, its): (usize, &Waiting)| {
            own_order(model, other, its.entered) < own_order(model, request, waiting.entered)
        };
        let is_first = waiting.class != Class::Behind;
        let has_first = is_first || own().any(|(_, its)| its.class != Class::Behind);
        expect(has_first, || format!("3: the user of {request} has no present first"))?;
        let shared = || own().filter(move |other| shares_key(model, *other, (request, waiting)));
        let is_alone = !is_first || shared().all(|(_, its)| its.class == Class::Behind);
        expect(is_alone, || format!("4: {request} is not the only first at a key"))?;
        let has_reason = is_first || shared().any(earlier);
        expect(has_reason, || format!("6: {request} is behind without an earlier own present request at its keys"))?;
        for (other, _) in shared().filter(|other| earlier(*other)) {
            for key in waiting.short.iter() {
                let is_later = model.position(world, other, key) < model.position(world, request, key);
                expect(is_later, || format!("7: {request} is before {other}, which is earlier in own order"))?;
            }
        }
        let is_own_limit = waiting.short.iter().all(|key| model.is_private(key) && model.setting.turns[0].is_some());
        let keeps_nothing = !is_own_limit || waiting.entries.iter().all(|key| model.is_private(key));
        expect(keeps_nothing, || format!("10: {request} is short at private keys alone and keeps capacity"))?;
    }
    Ok(())
}

/// Invariant 1: no requests wait for each other in a ring.
fn check_ring(model: &Model<'_>, world: &World) -> Result<(), String> {
    let blocks = |one: (usize, &Waiting), two: (usize, &Waiting)| {
        let mut keys = two.1.short.iter().filter(|key| one.1.entries.has(*key));
        keys.any(|key| model.position(world, one.0, key) < model.position(world, two.0, key))
    };
    let mut left: Vec<(usize, &Waiting)> = world.present().collect();
    while !left.is_empty() {
        let free = left.iter().position(|two| !left.iter().any(|one| one.0 != two.0 && blocks(*one, *two)));
        let Some(free) = free else {
            return Err(format!("1: a ring among {:?}", left.iter().map(|(at, _)| *at).collect::<Vec<_>>()));
        };
        left.swap_remove(free);
    }
    Ok(())
}

/// Invariant 2: a request that is before all present entries at its keys, and fits, is granted by a check.
fn check_heads(model: &Model<'_>, world: &World) -> Result<(), String> {
    for (request, waiting) in world.present() {
        let amounts = model.setting.requests[request].amounts_on(waiting.em);
        if !fits(model, amounts, &model.held(world)) {
            continue;
        }
        let mut decided = world.clone();
        let was_entitled = waiting.class == Class::Entitled;
        decided.waiting_mut(request).class = model.decided_class(world, request, Some(waiting.em), was_entitled);
        let is_head = |key: usize| {
            let others = world.present().filter(|(other, its)| *other != request && its.entries.has(key));
            let here = model.checked_position(&decided, request, key, world.now() + model.setting.step);
            let counts_own = model.is_new_at(waiting, key);
            let mut others = others.map(|(other, _)| (other, model.position(world, other, key)));
            others.all(|(other, position)| here < position && !(counts_own && model.is_own(other, request)))
        };
        let mut needed = (0..KEYS).filter(|key| amounts[*key] != [0; DIMENSIONS]);
        if needed.all(is_head) {
            let next = model.step(world, Event::Check(request))?;
            let is_granted = matches!(next.requests[request], Phase::Granted(_));
            expect(is_granted, || format!("2: {request} heads all of its keys and fits, but is refused"))?;
        }
    }
    Ok(())
}

/// Invariants of one event: 8, 9, the capacity, and the rules of rank times.
pub fn check_event(model: &Model<'_>, before: &World, after: &World, event: Event) -> Result<(), String> {
    let held = model.held(after);
    let is_within = held.iter().flatten().zip(model.setting.max.iter().flatten()).all(|(held, max)| held <= max);
    expect(is_within, || "more is granted than there is".to_owned())?;
    after.present().try_for_each(|present| check_entitled(model, before, after, event, present))?;
    for (request, waiting) in after.waiting() {
        let Phase::Waiting(was) = &before.requests[request] else { continue };
        expect(waiting.rank_time >= was.rank_time, || format!("the rank time of {request} falls"))?;
        let ranks = |waiting: &Waiting| (waiting.entered, waiting.rank_time);
        let changes = ranks(waiting) != ranks(was);
        expect(!(changes && matches!(event, Event::Return(_))), || format!("8: a return ranks {request} anew"))?;
        let is_shared = |waiting: &Waiting| waiting.short.iter().any(|key| !model.is_private(key));
        let comes_over = is_shared(waiting) && !is_shared(was) && !was.was_shared;
        let restarts = !comes_over || waiting.came.contains(&waiting.entered) && waiting.rank_time == waiting.entered;
        expect(restarts, || format!("the time of {request} at its own limit counts"))?;
        let is_kept = comes_over || waiting.entered == was.entered;
        expect(is_kept, || format!("the entry time of {request} changes"))?;
    }
    Ok(())
}

/// Invariant 9 for a request that waits: what is promised to it is left of the guarantees, and its own decision entitles it then.
fn check_entitled(
    model: &Model<'_>,
    before: &World,
    after: &World,
    event: Event,
    (request, waiting): (usize, &Waiting),
) -> Result<(), String> {
    let was = before.present().find(|(other, _)| *other == request).map(|(_, was)| was.class);
    let (is_entitled, was_entitled) = (waiting.class == Class::Entitled, was == Some(Class::Entitled));
    let is_promised_once = !is_entitled || was_entitled || is_within(model, after, request, |_, _| true);
    expect(is_promised_once, || format!("9: more than the guarantee is promised, with the amounts of {request}"))?;
    let (Event::Enter(decided, _) | Event::Check(decided) | Event::Move(decided) | Event::Return(decided)) = event
    else {
        return Ok(());
    };
    // The next decision of a request that has become a first can entitle it.
    let is_decided = decided == request && waiting.class == Class::First && was != Some(Class::Behind);
    let is_above = !is_decided || !is_within(model, after, request, |_, _| !was_entitled);
    expect(is_above, || format!("9: {request} is a first within its guarantee, and not entitled"))
}

/// Invariant 9 for a request that is granted: an entitled one is within its guarantee, beside the promises to others if it was not
/// entitled before. Another one takes nothing that entitled ones wait for.
pub fn check_guarantee(
    model: &Model<'_>,
    world: &World,
    (request, em): (usize, usize),
    class: Class,
    was_entitled: bool,
) -> Result<(), String> {
    if class == Class::Entitled {
        let entered = world.waiting().find(|(other, _)| *other == request).map_or(world.now(), |(_, its)| its.entered);
        let is_later = |other, its: &Waiting| own_order(model, other, its.entered) > own_order(model, request, entered);
        let is_displaced = |other, its: &Waiting| model.is_own(other, request) && is_later(other, its);
        let is_within = is_within(model, world, request, |other, its| !was_entitled && !is_displaced(other, its));
        return expect(is_within, || format!("9: {request} is granted as an entitled one above its guarantee"));
    }
    for key in 0..KEYS {
        let others = world.present().filter(|(other, its)| *other != request && its.short.has(key));
        let entitled = others.filter(|(_, its)| its.class == Class::Entitled);
        let is_left = fits_beside(model, world, (request, em), key, entitled);
        expect(is_left, || format!("9: {request} takes what an entitled request waits for"))?;
    }
    Ok(())
}

/// Invariant 7 for a request that is granted when it enters, or is new at some keys: it takes nothing there that earlier own
/// requests wait for.
pub fn check_newcomer(
    model: &Model<'_>,
    world: &World,
    request: usize,
    em: usize,
    is_new_at: impl Fn(usize) -> bool,
) -> Result<(), String> {
    let amounts = model.setting.requests[request].amounts_on(em);
    let entered = world.now();
    let any_em = model.setting.requests[request].any_em;
    for key in (0..KEYS).filter(|key| amounts[*key] != [0; DIMENSIONS] && is_new_at(*key)) {
        let groups = model.setting.kinds[key] == Kind::Em;
        let own = world.present().filter(|(other, its)| {
            let is_grouped = !groups || model.setting.requests[*other].any_em == any_em;
            let is_earlier = own_order(model, *other, its.entered) < own_order(model, request, entered);
            model.is_own(*other, request) && its.short.has(key) && is_grouped && is_earlier
        });
        let is_left = fits_beside(model, world, (request, em), key, own);
        expect(is_left, || format!("7: {request} takes what an earlier own request waits for"))?;
    }
    Ok(())
}

/// Invariant 5: notes a grant at each first that it goes before, and finds the second one of a turn.
pub fn log_grant(model: &Model<'_>, world: &mut World, granted: usize, em: usize) -> Result<(), String> {
    let (spec, its) = (&model.setting.requests[granted], world.get(granted));
    let amounts = spec.amounts_on(em);
    let is_counted = |request: usize, waiting: &Waiting, key: usize| {
        // A request that came over from another shared key later, with an older rank, is not counted.
        let comes_over = its.was_shared && (!its.short.has(key) || its.came[key] > waiting.rank_time);
        let goes_before = model.position(world, granted, key) < model.position(world, request, key);
        amounts[key] != [0; DIMENSIONS] && goes_before && !comes_over
    };
    let mut noted = vec![];
    for (request, waiting) in world.present() {
        let is_other = model.user(request) != spec.user && model.setting.turns[0].is_some();
        let is_equal = waiting.class == its.class && model.setting.requests[request].priority == spec.priority;
        if is_other && is_equal && waiting.class != Class::Behind {
            let keys = waiting.short.iter().filter(|key| is_counted(request, waiting, *key));
            noted.extend(keys.map(|key| (request, key)));
        }
    }
    for (request, key) in noted {
        // Requests that name no EM take turns apart from those that name theirs.
        let is_apart = spec.any_em && model.setting.kinds[key] == Kind::Em;
        let turn = 1 << (spec.user * 2 + usize::from(is_apart));
        let passed = &mut world.waiting_mut(request).passed[key];
        expect(*passed & turn == 0, || format!("5: {granted} is the second of its user before {request}"))?;
        *passed |= turn;
    }
    Ok(())
}
