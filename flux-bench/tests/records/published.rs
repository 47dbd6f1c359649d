//! What README and docs say of results is what `results/` has.

use clap::Parser;
use flux_bench::{
    CoreReport, FirstCallReport, PeersReport, Report, SCHEMA, ShowArgs, read_peers_report,
    read_report, shown_picture, shown_table,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// README.md and the files of docs/, with their names.
fn documents() -> Vec<(String, String)> {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let files = docs
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .chain([root().join("README.md")]);
    files
        .map(|path| {
            (
                path.file_name().unwrap().to_string_lossy().into_owned(),
                fs::read_to_string(&path).unwrap(),
            )
        })
        .collect()
}

/// The first table after each comment of the document, with the comment.
fn marked_tables(document: &str) -> Vec<(String, Vec<String>)> {
    let parts = document.split("<!-- ").skip(1);
    let table = |part: &str| {
        let (comment, rest) = part.split_once(" -->").unwrap();
        let lines = rest
            .lines()
            .skip_while(|line| !line.starts_with('|'))
            .take_while(|line| line.starts_with('|'));
        (comment.to_owned(), lines.map(str::to_owned).collect())
    };
    parts.map(table).collect()
}

#[derive(Parser)]
struct Shown {
    #[command(flatten)]
    args: ShowArgs,
}

/// The lines of the table that this command prints.
fn printed(command: &str) -> Vec<String> {
    let mut args = Shown::parse_from(command.split_whitespace().skip(1)).args;
    for path in args.files.iter_mut().chain(&mut args.peers) {
        *path = root().join(&path);
    }
    let text = shown_table(&args).unwrap();
    text.lines().filter(|line| line.starts_with('|')).map(str::to_owned).collect()
}

/// Whether a number of the texts, or a hundred times it, is this figure where it is rounded as
/// that.
fn has(texts: &[String], figure: &str) -> bool {
    let decimals = figure.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let numbers =
        texts.iter().flat_map(|text| text.split(|c: char| !c.is_ascii_digit() && c != '.'));
    let rounds = |number: f64| format!("{number:.decimals$}") == figure;
    numbers
        .filter_map(|word| word.parse::<f64>().ok())
        .any(|number| rounds(number) || rounds(100.0 * number))
}

/// The lines of the table of unaligned `m` that the frozen medians make.
fn unaligned() -> Vec<String> {
    let text = fs::read_to_string(root().join("results/frozen-medians.csv")).unwrap();
    let mut rows = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(',').collect::<Vec<_>>());
    let head = rows.next().unwrap();
    let column = |name: &str| head.iter().position(|&column| column == name).unwrap();
    let mut groups: Vec<([&str; 3], Vec<f64>)> = Vec::new();
    // Records of unaligned m have one word more in their names, as have those of fp16.
    for row in rows.filter(|row| {
        row[column("record")].split('-').count() == 4 && row[column("dtype")] == "bf16"
    }) {
        let key = ["device", "transport", "world"].map(|name| row[column(name)]);
        let ratio = row[column("t_op_ms")].parse::<f64>().unwrap()
            / row[column("t_serial_ms")].parse::<f64>().unwrap();
        match groups.iter_mut().find(|group| group.0 == key) {
            Some(group) => group.1.push(ratio),
            None => groups.push((key, vec![ratio])),
        }
    }
    let line = |([device, transport, world], ratios): ([&str; 3], Vec<f64>)| {
        let ahead = ratios.iter().filter(|&&ratio| ratio < 1.0).count();
        let [low, high] = [f64::min, f64::max]
            .map(|of: fn(f64, f64) -> f64| ratios.iter().copied().reduce(of).unwrap());
        format!(
            "| {device} | {transport} | {world} | {} | {ahead} | {low:.2} to {high:.2} |",
            ratios.len()
        )
    };
    groups.into_iter().map(line).collect()
}

/// The table line of a row of whole layers. Its base is what vLLM does, and in training what
/// Megatron-LM does.
fn layers_line(row: &Value) -> String {
    let ms = |mode: &str| row["ms"][mode].as_f64();
    let flux = ms("flux").unwrap();
    let base = if row["phase"] == "train" { "sp" } else { "ar" };
    let others = row["ms"]
        .as_object()
        .unwrap()
        .iter()
        .filter(|(mode, _)| *mode != "none" && !mode.starts_with("flux"));
    let times = others.filter_map(|(mode, ms)| Some((mode.as_str(), ms.as_f64()?)));
    let (best, best_ms) = times.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let (none, base_ms) = (ms("none").unwrap(), ms(base).unwrap());
    let [model, phase] = ["model", "phase"].map(|field| row[field].as_str().unwrap());
    let (speed_up, hidden) = (base_ms / flux, (base_ms - flux) / (base_ms - none));
    format!(
        "| {model} | {phase} | {} | {none:.3} | {base_ms:.3} ({base}) | {best_ms:.3} ({best}) | \
         {flux:.3} | {speed_up:.2} | {hidden:.2} |",
        row["m"]
    )
}

/// The table line of a training row whose column-parallel layers keep what they have gathered.
fn kept_line(row: &Value) -> String {
    let ms = |mode: &str| row["ms"][mode].as_f64().unwrap();
    let [none, sp, async_tp, flux, kept] = ["none", "sp", "async_tp", "flux", "flux_kept"].map(ms);
    let (model, speed_up, hidden) =
        (row["model"].as_str().unwrap(), sp / kept, (sp - kept) / (sp - none));
    format!(
        "| {model} | {} | {none:.3} | {sp:.3} | {async_tp:.3} | {flux:.3} | {kept:.3} | \
         {speed_up:.2} | {hidden:.2} |",
        row["m"]
    )
}

/// The table line of a row of Megatron-Core's steps, without the difference of losses.
fn step_line(row: &Value) -> String {
    let [theirs, flux] = ["megatron", "flux"].map(|mode| row["ms"][mode].as_f64().unwrap());
    format!(
        "| {} | {} | {theirs:.1} | {flux:.1} | {:.2} |",
        row["model"].as_str().unwrap(),
        row["m"],
        theirs / flux
    )
}

/// The table line of a row of vLLM's answers.
fn answer_line(row: &Value) -> String {
    let [theirs, flux] = ["default", "flux"].map(|mode| row["ms"][mode].as_f64().unwrap());
    let [batch, input, output] = ["batch", "input", "output"].map(|field| &row[field]);
    let case = row["case"].as_str().unwrap();
    let [their_step, step] = ["default", "flux"]
        .map(|mode| row["step_ms"][mode].as_f64().map_or("-".to_owned(), |ms| format!("{ms:.2}")));
    let times = format!("{theirs:.1} | {flux:.1} | {:.2} | {their_step} | {step}", theirs / flux);
    format!("| {case} | {batch} | {input} | {output} | {times} |")
}

/// The lines of all rows of some records that have what a line needs.
fn lines_of(files: &str, needs: &str, line: fn(&Value) -> String) -> Vec<String> {
    let records = files.split(' ').map(|file| {
        serde_json::from_str::<Value>(&fs::read_to_string(root().join(file)).unwrap()).unwrap()
    });
    let rows = records.flat_map(|record| record["rows"].as_array().unwrap().clone());
    rows.filter(|row| row["ms"][needs].is_number()).map(|row| line(&row)).collect()
}

/// What precedes a table says where its figures stand: `flux-bench show ...` prints the table,
/// `figures of FILE ...` have every decimal figure, `unaligned ...`, `layers of FILE`, `kept layers
/// of FILE ...`, `steps of FILE` and `answers of FILE` compute it.
#[test]
fn tables_of_documents_stand_in_the_results() {
    let mut kinds = [0; 7];
    for (name, document) in documents() {
        for (comment, table) in marked_tables(&document) {
            if comment.starts_with("flux-bench show ") {
                assert!(
                    table == printed(&comment),
                    "{name}: `{comment}` prints\n{}",
                    printed(&comment).join("\n")
                );
                kinds[0] += 1;
            } else if let Some(files) = comment.strip_prefix("figures of ") {
                let texts: Vec<String> = files
                    .split(' ')
                    .map(|file| fs::read_to_string(root().join(file)).unwrap())
                    .collect();
                let words = table
                    .iter()
                    .flat_map(|line| line.split(|c: char| !c.is_ascii_digit() && c != '.'));
                for figure in words.filter(|word| word.contains('.') && word.parse::<f64>().is_ok())
                {
                    assert!(has(&texts, figure), "{name}: {figure} is not in {files}");
                }
                kinds[1] += 1;
            } else if comment.starts_with("unaligned ") {
                assert!(table[2..] == unaligned(), "{name}: {}", unaligned().join("\n"));
                kinds[2] += 1;
            } else if let Some(file) = comment.strip_prefix("layers of ") {
                let lines = lines_of(file, "flux", layers_line);
                assert!(
                    table[2..].iter().all(|line| lines.contains(line)),
                    "{name}: {}",
                    lines.join("\n")
                );
                kinds[3] += 1;
            } else if let Some(files) = comment.strip_prefix("kept layers of ") {
                let lines = lines_of(files, "flux_kept", kept_line);
                assert!(table[2..] == lines, "{name}: {}", lines.join("\n"));
                kinds[4] += 1;
            } else if let Some(file) = comment.strip_prefix("steps of ") {
                let lines = lines_of(file, "megatron", step_line);
                let all = table.len() == 2 + lines.len()
                    && table[2..].iter().zip(&lines).all(|(row, line)| row.starts_with(line));
                assert!(all, "{name}: {}", lines.join("\n"));
                kinds[5] += 1;
            } else if let Some(file) = comment.strip_prefix("answers of ") {
                let lines = lines_of(file, "default", answer_line);
                assert!(table[2..] == lines, "{name}: {}", lines.join("\n"));
                kinds[6] += 1;
            }
        }
    }
    assert!(kinds.iter().all(|&tables| tables > 0), "{kinds:?}");
}

#[test]
fn times_in_the_readme_stand_in_marked_tables() {
    let (_, readme) = documents().into_iter().find(|(name, _)| name == "README.md").unwrap();
    let marked: Vec<String> =
        marked_tables(&readme).into_iter().flat_map(|(_, table)| table).collect();
    let is_time = |word: &str| {
        word.split_once('.').is_some_and(|(_, decimals)| decimals.len() == 3)
            && word.parse::<f64>().is_ok()
    };
    for line in readme.lines().filter(|line| line.split_whitespace().any(is_time)) {
        assert!(marked.iter().any(|row| row == line), "{line}");
    }
}

#[test]
fn pictures_show_the_records_of_their_names() {
    let mut pictures = 0;
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "svg") {
            continue;
        }
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let report = read_report(&root().join(format!("results/{stem}.json"))).unwrap();
        let peers = root().join(format!("results/{}-peers.json", stem.trim_end_matches("-nvlink")));
        let peers = peers.exists().then(|| read_peers_report(&peers, &report).unwrap());
        let committed = fs::read_to_string(&path).unwrap();
        assert!(
            committed == shown_picture(&report, peers.as_ref()),
            "{stem}: run `flux-bench show --svg`"
        );
        pictures += 1;
    }
    assert!(pictures > 0);
}

/// The rows of a file as a report of type `R` writes them again, with their text, and as they are
/// in the file.
fn rows<R: Serialize + DeserializeOwned>(text: &str) -> (Vec<Value>, String, Vec<Value>) {
    let report: R = serde_json::from_str(text).unwrap();
    let of = |report: Value| report["rows"].as_array().unwrap().clone();
    let (again, read) =
        (of(serde_json::to_value(&report).unwrap()), of(serde_json::from_str(text).unwrap()));
    (again, serde_json::to_string(&report).unwrap(), read)
}

#[test]
fn every_committed_row_is_read_and_one_of_todays_schema_written_as_it_is() {
    let mut seen = BTreeMap::<&str, usize>::new();
    for entry in fs::read_dir(root().join("results")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        // The name's last word, but for the ranks.
        let words = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches("-tp");
        let kind = ["core", "first-call", "peers", "nvlink", "pcie", "nccl", "mixed", "sustained"]
            .into_iter()
            .find(|kind| words.ends_with(kind));
        let kind = kind.filter(|_| path.extension().is_some_and(|extension| extension == "json"));
        let Some(kind) = kind else { continue };
        let text = fs::read_to_string(&path).unwrap();
        let (again, written, read) = match kind {
            "core" => rows::<CoreReport>(&text),
            "first-call" => rows::<FirstCallReport>(&text),
            "peers" => rows::<PeersReport>(&text),
            _ => rows::<Report>(&text),
        };
        *seen.entry(kind).or_default() += 1;
        assert!(again.len() == read.len() && !read.is_empty(), "{name}");
        // Laboratory records and those of older schemas are read, not written.
        let is_current = serde_json::from_str::<Value>(&text).unwrap()["schema"] == SCHEMA;
        if !is_current || ["core", "first-call"].contains(&kind) {
            continue;
        }
        for read in &read {
            let [op, model, m, n, k, tp, dtype] =
                ["op", "model", "m", "n", "k", "tp", "dtype"].map(|field| &read[field]);
            let head = format!(
                r#"{{"op":{op},"model":{model},"m":{m},"n":{n},"k":{k},"tp":{tp},"dtype":{dtype},"#
            );
            assert!(written.contains(&head), "{name}: {head}");
        }
        assert!(again == read, "{name}");
    }
    assert!(
        ["core", "first-call", "peers", "nvlink", "sustained"]
            .iter()
            .all(|kind| seen.contains_key(kind)),
        "{seen:?}"
    );
}
