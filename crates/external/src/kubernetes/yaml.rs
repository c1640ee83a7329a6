//! YAML as JSON, for kubeconfigs. Aliases are copied within a bound; merge keys and tags have no effect.
//!
//! Caller: `kubeconfig`.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, StrInput};
use serde_json::{Map, Value};

/// Maximum size of all copies of anchored values, in bytes: an alias of aliases would grow without bound.
const COPIED_BYTES_MAX: usize = 4 << 20;

/// Reads the only document of a text; `None` if it is malformed.
pub(super) fn read(text: &str) -> Option<Value> {
    let mut reader = YamlReader { events: Parser::new_from_str(text), anchors: HashMap::new(), copied: 0 };
    let first = loop {
        match reader.event()? {
            Event::StreamStart | Event::DocumentStart(..) => {}
            first => break first,
        }
    };
    let document = reader.node(first)?;
    let is_end = matches!(reader.event()?, Event::DocumentEnd) && matches!(reader.event()?, Event::StreamEnd);
    is_end.then_some(document)
}

struct YamlReader<'a> {
    events: Parser<'a, StrInput<'a>>,
    /// Values by the number of their anchor.
    anchors: HashMap<usize, Value>,
    /// Bytes of the copies so far.
    copied: usize,
}

impl<'a> YamlReader<'a> {
    fn event(&mut self) -> Option<Event<'a>> {
        Some(self.events.next()?.ok()?.0)
    }

    /// Reads the node that begins with an event. The parser bounds the nesting.
    fn node(&mut self, begin: Event<'a>) -> Option<Value> {
        let (anchor, value) = match begin {
            Event::Scalar(text, ScalarStyle::Plain, anchor, None) => (anchor, plain(&text)),
            Event::Scalar(text, _, anchor, _) => (anchor, Value::String(text.into_owned())),
            Event::SequenceStart(_, anchor, _) => (anchor, self.sequence()?),
            Event::MappingStart(_, anchor, _) => (anchor, self.mapping()?),
            Event::Alias(anchor) => {
                let value = self.anchors.get(&anchor)?.clone();
                return self.copy(value);
            }
            _ => return None,
        };
        if anchor != 0 {
            let copy = self.copy(value.clone())?;
            self.anchors.insert(anchor, copy);
        }
        Some(value)
    }

    fn sequence(&mut self) -> Option<Value> {
        let mut values = Vec::new();
        loop {
            match self.event()? {
                Event::SequenceEnd => return Some(Value::Array(values)),
                begin => values.push(self.node(begin)?),
            }
        }
    }

    fn mapping(&mut self) -> Option<Value> {
        let mut values = Map::new();
        loop {
            let key = match self.event()? {
                Event::MappingEnd => return Some(Value::Object(values)),
                Event::Scalar(key, ..) => key.into_owned(),
                _ => return None,
            };
            let begin = self.event()?;
            let value = self.node(begin)?;
            if values.insert(key, value).is_some() {
                return None;
            }
        }
    }

    /// Counts a copy; `None` above the bound.
    fn copy(&mut self, value: Value) -> Option<Value> {
        self.copied += value.to_string().len();
        (self.copied <= COPIED_BYTES_MAX).then_some(value)
    }
}

/// Returns the value of a plain scalar. Numbers stay texts, as names of digits do.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => true.into(),
        "false" | "False" | "FALSE" => false.into(),
        text => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_is_read_as_json() {
        for (text, value) in [
            ("a: 1\nb: [x, 'true', true, ~]", Some(json!({"a": "1", "b": ["x", "true", true, null]}))),
            (
                "# first\n---\na:\n- b: |\n    x\n    y\n  c: !!str true",
                Some(json!({"a": [{"b": "x\ny\n", "c": "true"}]})),
            ),
            (r#"{"a": {"b": "\u00e9"}}"#, Some(json!({"a": {"b": "\u{e9}"}}))),
            ("a: &one {x: y}\nb: *one", Some(json!({"a": {"x": "y"}, "b": {"x": "y"}}))),
            ("a: *none", None),
            ("a: 1\na: 2", None),
            ("a: [1", None),
            ("a: 1\n---\nb: 1", None),
            ("", None),
        ] {
            assert_eq!(read(text), value, "{text}");
        }
    }

    #[test]
    fn yaml_aliases_and_nesting_are_bounded() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for n in 1..20 {
            let before = format!("*a{}", n - 1);
            bomb += &format!("a{n}: &a{n} [{}]\n", [&*before; 9].join(", "));
        }
        assert_eq!(read(&bomb), None);
        assert_eq!(read(&"[".repeat(100_000)), None);
        assert_eq!(read(&"- ".repeat(100_000)), None);
    }
}
