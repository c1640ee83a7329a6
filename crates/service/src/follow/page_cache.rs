//! Cache of the history pages that were read last, shared by all followers.
//!
//! Bounded by bytes and by number of pages; the oldest page is evicted first.
//!
//! Callers: `follow` and its `reader`.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use crate::lock::lock;
use rm_model::action::ActionRecord;

/// Maximum number of lines in one message.
pub const PAGE_LINES: usize = 500;

/// Approximate maximum number of bytes in one message; its last line may exceed it. A follower that does not read retains one
/// message.
const PAGE_BYTES: usize = 128 << 10;

/// Approximate maximum number of bytes in the cache.
const KEPT_BYTES: usize = 16 << 20;

/// Maximum number of pages in the cache; pages have few lines each if there is little activity.
const KEPT_PAGES: usize = 512;

/// Size of a line without its texts, in bytes.
const LINE_BYTES: usize = 512;

/// All lines after one number, up to another.
#[derive(Debug)]
pub struct HistoryPage {
    /// Number after which the lines begin.
    after: i64,
    /// Number of the last line.
    pub last: i64,
    lines: Vec<ActionRecord>,
    bytes: usize,
}

impl HistoryPage {
    /// Splits all lines after `after` into pages of the size of a message.
    pub fn of(after: i64, lines: Vec<ActionRecord>) -> Vec<Self> {
        let mut pages: Vec<Self> = Vec::new();
        for line in lines {
            let before = pages.last().map_or(after, |page| page.last);
            match pages.last_mut() {
                Some(page) if page.lines.len() < PAGE_LINES && page.bytes < PAGE_BYTES => page.push(line),
                _ => {
                    let mut page = Self { after: before, last: before, lines: Vec::new(), bytes: 0 };
                    page.push(line);
                    pages.push(page);
                }
            }
        }
        pages
    }

    fn push(&mut self, line: ActionRecord) {
        self.last = line.number;
        self.bytes += size(&line);
        self.lines.push(line);
    }

    /// Returns the lines after `number`.
    pub fn behind(&self, number: i64) -> impl Iterator<Item = &ActionRecord> {
        self.lines.iter().skip_while(move |line| line.number <= number)
    }
}

/// Approximate size of a line, in bytes.
fn size(line: &ActionRecord) -> usize {
    let texts = [&line.before, &line.after, &line.reason, &line.address].into_iter().flatten().map(String::len);
    let of_ticket = line.detail.as_deref().map_or(0, |detail| {
        let labels = detail.labels.as_map().iter().map(|(key, value)| key.len() + value.len());
        detail.creator.len() + detail.engine_type.len() + labels.sum::<usize>()
    });
    LINE_BYTES + texts.sum::<usize>() + of_ticket
}

/// The pages that were read last.
#[derive(Debug, Default)]
pub struct HistoryPageCache(Mutex<CachedPages>);

#[derive(Debug, Default)]
struct CachedPages {
    pages: VecDeque<Arc<HistoryPage>>,
    bytes: usize,
}

impl HistoryPageCache {
    /// Returns the page with the line after `number`, if it is cached.
    pub fn next(&self, number: i64) -> Option<Arc<HistoryPage>> {
        let kept = lock(&self.0);
        kept.pages.iter().rev().find(|page| page.after <= number && number < page.last).cloned()
    }

    /// Adds pages; evicts the oldest ones above the bounds.
    pub fn keep(&self, pages: impl IntoIterator<Item = HistoryPage>) {
        let mut kept = lock(&self.0);
        for page in pages {
            kept.bytes += page.bytes;
            kept.pages.push_back(Arc::new(page));
        }
        while (kept.bytes > KEPT_BYTES || kept.pages.len() > KEPT_PAGES)
            && let Some(oldest) = kept.pages.pop_front()
        {
            kept.bytes -= oldest.bytes;
        }
    }

    /// Evicts all pages.
    pub fn clear(&self) {
        *lock(&self.0) = CachedPages::default();
    }
}

#[cfg(test)]
mod tests {
    use time::OffsetDateTime;

    use super::*;
    use rm_model::{
        action::Action,
        audit::Subject,
        em::EmInstance,
        resource::{Resource, ResourceType},
    };

    fn line(number: i64, bytes: usize) -> ActionRecord {
        ActionRecord {
            number,
            action: Action::Registered,
            ticket: None,
            detail: None,
            subject: Subject::Em(EmInstance::parse("em", "ecm", "host1").unwrap()),
            resource: Resource::zero(ResourceType::Memory),
            limit_mode: None,
            reason: Some("x".repeat(bytes)),
            actor: "linkis-rm".into(),
            address: None,
            before: None,
            after: None,
            at: OffsetDateTime::UNIX_EPOCH,
        }
    }

    fn numbers(page: &HistoryPage, behind: i64) -> Vec<i64> {
        page.behind(behind).map(|line| line.number).collect()
    }

    #[test]
    fn page_cache_returns_later_lines_of_any_cached_position() {
        let recent = HistoryPageCache::default();
        // Numbers 13 and 14 belong to transactions that were rolled back.
        recent.keep(HistoryPage::of(10, vec![line(11, 0), line(12, 0), line(15, 0)]));
        let found = |number| recent.next(number).map(|page| numbers(&page, number));
        assert_eq!(found(9), None, "lines between may exist");
        assert_eq!(found(10), Some(vec![11, 12, 15]));
        assert_eq!(found(12), Some(vec![15]));
        assert_eq!(found(13), Some(vec![15]));
        assert_eq!(found(15), None, "no page is cached yet");
        recent.clear();
        assert_eq!(found(10), None);
    }

    #[test]
    fn history_pages_are_adjacent_and_of_message_size() {
        let pages = HistoryPage::of(0, (1..=1201).map(|number| line(number, 0)).collect());
        let spans: Vec<_> = pages.iter().map(|page| (page.after, page.last, page.lines.len())).collect();
        let most = i64::try_from(PAGE_BYTES.div_ceil(LINE_BYTES).min(PAGE_LINES)).unwrap();
        assert!(spans.windows(2).all(|two| two[0].1 == two[1].0), "{spans:?}");
        assert_eq!((spans[0].1, spans.last().unwrap().1), (most, 1201));
        let large = HistoryPage::of(0, vec![line(1, PAGE_BYTES), line(2, 0), line(3, 0)]);
        assert_eq!(large.iter().map(|page| page.lines.len()).collect::<Vec<_>>(), [1, 2]);
        assert!(HistoryPage::of(7, vec![]).is_empty());
    }

    #[test]
    fn page_cache_has_a_bound() {
        let recent = HistoryPageCache::default();
        for number in 1..=200 {
            recent.keep(HistoryPage::of(number - 1, vec![line(number, PAGE_BYTES)]));
        }
        assert!(lock(&recent.0).bytes <= KEPT_BYTES && recent.next(199).is_some() && recent.next(0).is_none());
        let kept = |recent: &HistoryPageCache| {
            let kept = lock(&recent.0);
            (kept.pages.len(), kept.bytes, kept.pages.iter().map(|page| page.bytes).sum::<usize>())
        };
        let (_, counted, held) = kept(&recent);
        assert_eq!(counted, held);
        for number in 201..=2000 {
            recent.keep(HistoryPage::of(number - 1, vec![line(number, 0)]));
        }
        let (pages, counted, held) = kept(&recent);
        assert!(pages <= KEPT_PAGES && counted == held && recent.next(1999).is_some(), "{pages} {counted} {held}");
    }
}
