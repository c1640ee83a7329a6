use super::*;
use proptest::prelude::*;

#[test]
fn limits_file_is_parsed() {
    let text = "# Each.\n[[limit]]\neach = ['user']\nmax = { instances = 10, \"special.gpu\" = 0 }\n[[limit]]\n\
        max.memory = '1k'\nmax.cores = 0x10\n[limit.labels]\nuser = 'hadoop'\ncreator = 'IDE'\n[[limit]]\neach = ['creator']\nmode = 'off'\n";
    let rules = parse(text).unwrap().rules.unwrap().into_iter();
    let shown: Vec<_> = rules.map(|rule| format!("{} {} {:?}", rule.pattern, rule.mode.as_str(), rule.max)).collect();
    assert_eq!(shown[0], "each user enforced {Instances: 10, Custom(\"gpu\"): 0}");
    assert_eq!(shown[1..], ["creator=IDE,user=hadoop enforced {Memory: 1024, Cores: 16}", "each creator off {}"]);
    assert_eq!(parse("# No limits.\n"), Ok(LimitReplacement::default()));
}

#[test]
fn limits_are_read_as_written() {
    let lines = "[[limit]]\nlabels = { \"team\" = \"a \\\"b\\\" \\\\\" }\neach = [\"creator\", \"user\"]\n\
        max = { \"memory\" = \"20g\", \"cores\" = 4096, \"special.gpu\" = 0 }\nguarantee = { \"memory\" = \"1g\" }\nmode = \"advisory\"\n\
        [[limit]]\neach = [\"user\"]\nmax = { \"memory\" = 1025 }\n[[limit]]\neach = [\"creator\"]\nmode = \"off\"\n";
    let new = parse(lines).unwrap();
    assert_eq!(text(&new), lines);
    assert_eq!(new.queue, QueueRuleReplacement::default());
}

/// A section that the file does not have stays as it is, and an empty one deletes its rules.
#[test]
fn rules_of_wait_queues_are_read_as_written() {
    let lines = "[order]\nfair_by = [\"creator\", \"user\"]\nposition_kept = \"1m 30s\"\n\
        [[priority]]\nlabels = { \"creator\" = \"IDE\" }\neach = [\"user\"]\ndefault_priority = -30\nmax_priority = 60\n\
        [[reclaim]]\neach = [\"user\"]\nmode = \"observe\"\nidle_after = \"5m\"\ngrace = \"1s 500ms\"\nper_minute = 7\nbusy = true\n\
        min_life = \"15m\"\n";
    let new = parse(lines).unwrap();
    assert_eq!(text(&new), lines);
    assert!(new.queue.order.is_some() && new.queue.priorities.is_some() && new.queue.reclaim.is_some());
    let none = "limit = []\npriority = []\nreclaim = []\n[order]\nfair_by = []\nposition_kept = \"0s\"\n";
    assert_eq!(text(&parse(none).unwrap()), none);
    let shortest = "[order]\n[[priority]]\neach = ['user']\n[[reclaim]]\neach = ['user']\nmode = 'off'\n";
    let QueueRuleReplacement { order, priorities, reclaim } = parse(shortest).unwrap().queue;
    assert_eq!(order, Some(QueueOrder::default()));
    let pattern = LabelPattern::new([("user".to_owned(), None)].into());
    let rule = PriorityRule { pattern: pattern.clone(), default: 0, max: 0 };
    assert_eq!(
        (priorities, reclaim),
        (Some(Priorities::new([rule])), Some(ReclaimPolicies::new([ReclaimPolicy::new(pattern, ReclaimMode::Off)])))
    );
}

#[test]
fn mistakes_are_reported_with_their_lines() {
    let long = format!("'{}' = 'x',", "x".repeat(256));
    let lines = [
        (
            "limits = 1",
            "file: has the unknown key \"limits\"; known are [[limit]], [order], [[priority]] and [[reclaim]]",
        ),
        ("[[limit]]", "labels: names 0 labels (with each); must name 1 to 8"),
        ("maximum = 1", "limit: has the unknown key \"maximum\"; known are labels, each, mode, max and guarantee"),
        ("max = {}", "max: names 0 dimensions; must name 1 to 64"),
        ("[[limit]]", ""),
        ("labels = { user = 'u', a = 1,", "labels[\"a\"]: must be a string; is of the type integer"),
        (&long, "labels (a key): has 256 characters; at most 255 are allowed"),
        ("b = '' }", "labels[\"b\"]: must not be empty"),
        ("each = ['user']", "each: names \"user\" a second time"),
        ("max = { cpus = 1,", "max: has the unknown dimension \"cpus\"; known are memory,"),
        ("instances = -1,", "max[\"instances\"]: is -1; must not be negative"),
        ("queue_cores = 9223372036854775808,", "max[\"queue_cores\"]: is 9223372036854775808; at most"),
        ("cores = '2g',", "max[\"cores\"]: must be a whole number; is of the type string"),
        ("queue_memory = 1.5,", "max[\"queue_memory\"]: must be whole bytes or a size"),
        ("memory = '20x' }", "max[\"memory\"]: `20x` is not a size"),
        ("[[limit]]", ""),
        ("max = { memory = 20g, cpus = 1 }", "not TOML: string values must be quoted"),
        ("[[limit]]", ""),
        ("max.cores = 1", ""),
        ("each = ['user']", ""),
        ("[[limit]]", "limit: has the same labels as the one in line 18 (each user)"),
        ("each = ['user']", ""),
        ("max = 7", "max: must be a table; is of the type integer"),
        ("[[limit]]", "max: names 0 dimensions; must name 1 to 64"),
        ("each = 'user'", "each: must be an array such as [\"user\"]; is of the type string"),
        ("[[limit]]", "max: names \"queue_cores\", which each queue has of its own: add the label \"queue\","),
        ("labels = { namespace = 'n' }", ""),
        ("max = { cores = 1, queue_cores = 1 }", ""),
        ("[[limit]]", ""),
        ("labels = { queue = 'q' }", ""),
        ("max = { cores = 1, queue_cores = 1 }", ""),
        ("mode = 'of'", "mode: is \"of\"; must be \"enforced\", \"advisory\" or \"off\""),
        ("[[limit]]", "guarantee: has 2 for \"cores\"; must be at most its maximum of 1"),
        ("each = ['engine_type']", ""),
        ("max = { cores = 1 }", ""),
        ("guarantee = { cores = 2 }", ""),
        ("[[limit]]", "guarantee: names \"memory\", which max does not name: a guarantee needs a maximum"),
        ("each = ['tenant']", ""),
        ("max = { cores = 1 }", ""),
        ("guarantee = { memory = 2 }", ""),
        ("[[limit]]", ""),
        ("labels = { zone = 'a ' }", "labels[\"zone\"]: has white space at an end; leave it out"),
        ("max.cores = 1", ""),
    ];
    assert_mistakes(&lines);
}

#[test]
fn mistakes_in_rules_of_wait_queues_are_reported_with_their_lines() {
    assert_mistakes(&[
        ("[order]", ""),
        (
            "fair_by = ['em']",
            "order.fair_by: names \"em\", which is open until the grant; name labels of the request, such as",
        ),
        ("position_kept = '500ms'", "order.position_kept: is 500ms; must be"),
        ("turns = 1", "order: has the unknown key \"turns\"; known are fair_by and position_kept"),
        ("[[priority]]", ""),
        ("each = ['user']", ""),
        ("default_priority = 601", "default_priority: is 601; must be from -600 to 600"),
        ("[[priority]]", "priority.default_priority: is 2; must be at most max_priority, which is 1"),
        ("each = ['creator']", ""),
        ("default_priority = 2", ""),
        ("max_priority = 1", ""),
        ("[[reclaim]]", "mode: is required: off, observe, advise or stop"),
        ("each = ['user']", ""),
        ("grace = 30", "grace: must be a string such as \"30s\"; is of the type integer"),
        ("[[reclaim]]", ""),
        ("mode = 'kill'", "mode: is \"kill\"; must be \"off\", \"observe\", \"advise\" or \"stop\""),
        ("each = ['creator']", ""),
        ("idle_after = '2d'", "idle_after: \"2d\" must be between 1s and 1d"),
        ("per_minute = 0", "per_minute: is 0; must be from 1 to 100000"),
        ("busy = 1", "busy: must be true or false; is of the type integer"),
        ("min_life = '0s'", "min_life: \"0s\" must be between 1s and 1d"),
        ("[[reclaim]]", ""),
        ("each = ['zone']", ""),
        ("mode = 'off'", ""),
        ("[[reclaim]]", "reclaim: has the same labels as the one in line 22 (each zone)"),
        ("each = ['zone']", ""),
        ("mode = 'stop'", ""),
        ("[[reclaim]]", ""),
        ("each = ['tenant']", ""),
        (
            "limit = []",
            "reclaim: has the unknown key \"limit\"; known are labels, each, mode, idle_after, grace, per_minute, busy and \
                min_life; a section",
        ),
        ("grace = 30", "grace: must be a string such as"),
        ("mode = 'stop'", ""),
    ]);
}

/// Asserts that the mistakes of a file of these lines begin with the texts beside them.
#[track_caller]
fn assert_mistakes(lines: &[(&str, &str)]) {
    let text = lines.iter().map(|(line, _)| *line).collect::<Vec<_>>().join("\n");
    let text = parse(&text).unwrap_err().to_string();
    let expected = (1..).zip(lines).filter(|(_, (_, start))| !start.is_empty());
    assert_eq!(text.lines().count(), expected.clone().count(), "{text}");
    for (shown, (line, (_, start))) in text.lines().zip(expected) {
        assert!(shown.starts_with(&format!("line {line}: {start}")), "{shown}, not line {line}: {start}");
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(
        text in r#"(?s).*|(\[\[limit\]\]|\[order\]|\[\[priority\]\]|\[\[reclaim\]\]|\n|each|=|\[|\]|labels|max|mode|grace|fair_by|\{|\}|'a'|,|1|cores|\.|"""|é|#| ){0,40}"#,
    ) {
        let lines = 1..=text.matches('\n').count() + 1;
        let fits = |all: Vec<(usize, String)>| !all.is_empty() && all.iter().all(|(line, _)| lines.contains(line));
        prop_assert!(parse(&text).err().is_none_or(|error| fits(error.0)));
    }
}
