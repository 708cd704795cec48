//! The door for JSON: its documentation is true, its refusals name what they refuse, and it says
//! what the rooms say.
//!
//! `UPDATE=1 cargo test -p dormouse-parallel --test queries` rewrites the answers; read the diff.

use std::fs;
use std::path::{Path, PathBuf};

use dormouse_parallel::balance::{Options, Shares, Workload};
use dormouse_parallel::query::{QueryError, Trees, names, query};
use dormouse_schedule::cost::{Fit, Weighting};
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::*;
use serde_json::{Value, json};

/// Characters of a text that the documentation shows.
const SHOWN: usize = 90;
/// Columns of the documentation.
const WIDTH: usize = 130;

/// One ask of the documentation.
struct Example {
    name: String,
    request: String,
    answer: String,
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/queries.md")
}

/// Every section's name and its two blocks.
fn examples() -> Vec<Example> {
    let text = fs::read_to_string(path()).unwrap();
    let section = |section: &str| {
        let (name, rest) = section.split_once('\n').unwrap();
        let blocks: Vec<&str> = rest.split("```").collect();
        let [_, request, _, answer, _] = blocks[..] else { panic!("{name} has no two blocks") };
        let block = |text: &str| text.strip_prefix("json\n").unwrap().to_owned();
        Example { name: name.to_owned(), request: block(request), answer: block(answer) }
    };
    text.split("\n## ").skip(1).map(section).collect()
}

fn answer(request: &Value) -> Result<Value, QueryError> {
    let text = query(&request.to_string())?;
    let reply: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(reply["version"], 1);
    assert_eq!(reply.as_object().unwrap().len(), 2, "{text}");
    Ok(reply["answer"].clone())
}

/// What the documentation shows of an answer.
fn shown(value: Value) -> Value {
    match value {
        Value::String(text) if text.chars().count() > SHOWN => {
            Value::String(text.chars().take(SHOWN).chain(['…']).collect())
        }
        other => other,
    }
}

/// JSON on one line.
fn inline(value: &Value) -> String {
    let list = |items: Vec<String>| items.join(", ");
    match value {
        Value::Array(all) => format!("[{}]", list(all.iter().map(inline).collect())),
        Value::Object(all) => {
            let entry = |(key, item)| format!("\"{key}\": {}", inline(item));
            format!("{{{}}}", list(all.iter().map(entry).collect()))
        }
        other => other.to_string(),
    }
}

/// JSON in few lines: what does not fit on one is taken apart, its small parts side by side.
/// `column` is where the value begins.
fn print(value: &Value, indent: usize, column: usize) -> String {
    let flat = inline(value);
    let items: Vec<(String, &Value)> = match value {
        Value::Array(all) => all.iter().map(|item| (String::new(), item)).collect(),
        Value::Object(all) => {
            all.iter().map(|(key, item)| (format!("\"{key}\": "), item)).collect()
        }
        _ => Vec::new(),
    };
    if items.is_empty() || column + flat.len() < WIDTH {
        return flat;
    }
    let (open, close) = if value.is_array() { ('[', ']') } else { ('{', '}') };
    let (mut out, mut column) = (String::from(open), column + 1);
    for (at, (key, item)) in items.iter().enumerate() {
        let length = key.len() + inline(item).len();
        if at > 0 {
            out.push(',');
        }
        if at > 0 && column + length + 3 > WIDTH {
            out.push_str(&format!("\n{:1$}", "", indent + 1));
            column = indent + 1;
        } else if at > 0 {
            out.push(' ');
            column += 1;
        }
        let printed = print(item, indent + 1, column + key.len());
        column = match printed.rsplit_once('\n') {
            Some((_, last)) => last.len(),
            None => column + key.len() + printed.len() + 1,
        };
        out.push_str(key);
        out.push_str(&printed);
    }
    out.push(close);
    out
}

#[test]
fn the_documented_examples_give_their_answers() {
    let mut text = fs::read_to_string(path()).unwrap();
    for Example { name, request, answer: wanted } in examples() {
        let request: Value =
            serde_json::from_str(&request).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(request["query"], name.as_str());
        let seen = shown(answer(&request).unwrap_or_else(|e| panic!("{name}: {e}")));
        if std::env::var_os("UPDATE").is_some() {
            let printed = print(&json!({"version": 1, "answer": seen}), 0, 0);
            let (before, rest) = text.split_once(&format!("\n## {name}\n")).unwrap();
            let (old, new) = (format!("json\n{wanted}```"), format!("json\n{printed}\n```"));
            text = format!("{before}\n## {name}\n{}", rest.replacen(&old, &new, 1));
        } else {
            let wanted: Value = serde_json::from_str(&wanted).unwrap();
            assert_eq!(json!({"version": 1, "answer": seen}), wanted, "{name}");
        }
    }
    if std::env::var_os("UPDATE").is_some() {
        fs::write(path(), text).unwrap();
    }
}

#[test]
fn every_ask_is_documented_once_in_order() {
    let documented: Vec<String> = examples().into_iter().map(|example| example.name).collect();
    assert_eq!(documented, names().collect::<Vec<_>>());
}

fn request(name: &str) -> Value {
    let example = examples().into_iter().find(|example| example.name == name).unwrap();
    serde_json::from_str(&example.request).unwrap()
}

fn refusal(request: &Value) -> String {
    answer(request).unwrap_err().to_string()
}

#[test]
fn what_is_not_known_is_named() {
    let unknown = refusal(&json!({"version": 1, "query": "shapes"}));
    assert!(unknown.contains("\"shapes\"") && unknown.contains("plan, plan_group"), "{unknown}");
    assert_eq!(refusal(&json!({"version": 2, "query": "plan"})), "version is 2; accepted: 1");
    assert!(refusal(&json!({"query": "plan"})).contains("missing field `version`"));
    assert!(refusal(&json!({"version": 1, "query": "fit"})).contains("missing field `samples`"));
    assert!(matches!(query("{"), Err(QueryError::Json(_))));
    assert!(matches!(query("{\"version\": 1, \"ask\": \"plan\"} x"), Err(QueryError::Json(_))));
}

/// Every object of every example, one field more: no depth is too deep to be looked at.
#[test]
fn a_field_that_nothing_reads_is_refused_wherever_it_is() {
    let mut tried = 0;
    for Example { name, request, .. } in examples() {
        let whole: Value = serde_json::from_str(&request).unwrap();
        for pointer in objects(&whole) {
            // A tagged enum keeps no place for what it does not know (see the room's A1).
            if pointer.contains("/collectives/") {
                continue;
            }
            let mut request = whole.clone();
            let object = request.pointer_mut(&pointer).unwrap().as_object_mut().unwrap();
            object.insert("microbatch_tokenz".to_owned(), json!(1));
            let said = refusal(&request);
            // A choice has one name: with two it is no JSON of its type.
            let named =
                said.contains("microbatch_tokenz") || said.starts_with("the request: expected");
            assert!(named, "{name} at {pointer}: {said}");
            tried += 1;
        }
    }
    assert!(tried > 100, "{tried} objects");
}

/// JSON pointers of all objects.
fn objects(value: &Value) -> Vec<String> {
    places(value).into_iter().filter(|(_, value)| value.is_object()).map(|(at, _)| at).collect()
}

fn places(value: &Value) -> Vec<(String, Value)> {
    let mut found = vec![(String::new(), value.clone())];
    let children: Vec<(String, &Value)> = match value {
        Value::Object(all) => all.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(all) => all.iter().enumerate().map(|(at, it)| (at.to_string(), it)).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        found.extend(places(child).into_iter().map(|(at, it)| (format!("/{key}{at}"), it)));
    }
    found
}

/// Every number of every example, at and past what its type holds: an answer or a sentence, never
/// a panic.
#[test]
fn numbers_at_their_ends_are_answered_or_refused() {
    let ends = [
        json!(0),
        json!(1),
        json!(u32::MAX),
        json!(1_u64 << 63),
        json!(u64::MAX),
        json!(-1),
        json!(1e300),
    ];
    let (mut refused, mut panics) = (0, Vec::new());
    for Example { name, request, .. } in examples() {
        let whole: Value = serde_json::from_str(&request).unwrap();
        for (pointer, _) in places(&whole).into_iter().filter(|(_, value)| value.is_number()) {
            for end in &ends {
                let mut request = whole.clone();
                *request.pointer_mut(&pointer).unwrap() = end.clone();
                match std::panic::catch_unwind(|| answer(&request)) {
                    Ok(answered) => refused += u32::from(answered.is_err()),
                    Err(_) => panics.push(format!("{name}: {end} at {pointer}")),
                }
            }
        }
    }
    assert!(panics.is_empty(), "{panics:#?}");
    assert!(refused > 1000, "{refused} refused");
}

#[test]
fn a_room_s_refusal_is_its_own_sentence() {
    let mut request = request("shares");
    request["options"]["ranks"] = json!(0);
    assert_eq!(refusal(&request), "0 ranks; accepted: 1 to 16384");
    let mut request = self::request("plan");
    request["forest"]["parents"] = json!([null, 0, 2]);
    assert!(refusal(&request).starts_with("node 2 has parent 2"));
}

/// The request's types and the answer's are the room's own: the same is said without the door.
#[test]
fn the_door_says_what_the_rooms_say() {
    let request = request("shares");
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[5, 2, 3]).unwrap();
    let options: Options = serde_json::from_value(request["options"].clone()).unwrap();
    let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
    let wanted = Shares::new(&batch, &options).unwrap();
    let seen: Shares = serde_json::from_value(answer(&request).unwrap()).unwrap();
    assert_eq!(seen, wanted);
    assert_eq!(seen.shares.len(), 2);

    let mut fit = self::request("fit");
    fit["weighting"] = json!("relative");
    let samples: Vec<cost::Sample> = serde_json::from_value(fit["samples"].clone()).unwrap();
    let seen: Fit = serde_json::from_value(answer(&fit).unwrap()).unwrap();
    assert_eq!(seen, Fit::new(&samples, Weighting::Relative).unwrap());

    let plan = self::request("plan");
    let scoring: Vec<Scoring> = serde_json::from_value(plan["scoring"].clone()).unwrap();
    let model: ModelShape = serde_json::from_value(plan["model"].clone()).unwrap();
    let batch = dormouse_schedule::Batch {
        forest,
        scoring,
        model,
        vocab: 100,
        microbatch_rows: 8,
        ..dormouse_schedule::Batch::default()
    };
    let wanted: Value = serde_json::from_str(&Plan::of_batch(&batch).unwrap().to_json()).unwrap();
    assert_eq!(answer(&plan).unwrap(), wanted);
}

/// Ranks that agree may start; one that does not is named with its part.
#[test]
fn ranks_agree_or_are_told_apart() {
    let first = answer(&request("agreement")).unwrap();
    let mut other = request("agreement");
    other["budget_bytes"] = json!(17);
    let second = answer(&other).unwrap();
    let agree = |all: Vec<&Value>| {
        answer(&json!({"version": 1, "query": "agree", "ranks": all.len(), "agreements": all}))
    };
    assert_eq!(agree(vec![&first, &first]).unwrap(), Value::Null);
    let said = agree(vec![&first, &second, &first]).unwrap_err().to_string();
    assert!(said.starts_with("ranks differ in options") && said.ends_with("on rank 1"), "{said}");
}

#[test]
fn trees_are_forests() {
    let sequences: [&[i32]; 4] = [&[1, 2, 3], &[1, 2, 4, 5], &[1, 2], &[1, 2, 3]];
    let forest = Forest::from_slices(&sequences, &[], 10).unwrap();
    let text = Trees::from(&forest).to_json();
    let trees: Trees = serde_json::from_str(&text).unwrap();
    assert_eq!(Forest::try_from(trees).unwrap(), forest);
}
