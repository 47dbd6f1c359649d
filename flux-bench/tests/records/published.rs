//! What README and docs say of results is what `results/` has.

use clap::Parser;
use flux_bench::{
    CoreReport, FirstCallReport, LayerRow, LayersReport, PeersReport, Report, SCHEMA, ShowArgs,
    shown_picture, shown_table,
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

/// The arguments of a command, with files below the root.
fn shown(command: &str) -> ShowArgs {
    let mut args = Shown::parse_from(command.split_whitespace().skip(1)).args;
    for path in args.files.iter_mut().chain(&mut args.peers).chain(&mut args.svg) {
        *path = root().join(&path);
    }
    args
}

/// The lines of the table that this command prints.
fn printed(command: &str) -> Vec<String> {
    let text = shown_table(&shown(command)).unwrap();
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

/// The table line of a row of whole layers.
fn layers_line(row: &LayerRow) -> String {
    let (base, base_ms) = row.base().unwrap();
    let (best, best_ms) = row.best_other().unwrap();
    let [none, flux] = ["none", "flux"].map(|mode| row.ms[mode]);
    let (speed_up, hidden) = (row.speed_up("flux").unwrap(), row.hidden("flux").unwrap());
    format!(
        "| {} | {} | {} | {none:.3} | {base_ms:.3} ({base}) | {best_ms:.3} ({best}) | {flux:.3} | \
         {speed_up:.2} | {hidden:.2} |",
        row.model,
        row.phase,
        row.m.unwrap()
    )
}

/// The table line of a training row whose column-parallel layers keep what they have gathered.
fn kept_line(row: &LayerRow) -> String {
    let [none, sp, async_tp, flux, kept] =
        ["none", "sp", "async_tp", "flux", "flux_kept"].map(|mode| row.ms[mode]);
    let (speed_up, hidden) = (row.speed_up("flux_kept").unwrap(), row.hidden("flux_kept").unwrap());
    format!(
        "| {} | {} | {none:.3} | {sp:.3} | {async_tp:.3} | {flux:.3} | {kept:.3} | {speed_up:.2} | \
         {hidden:.2} |",
        row.model,
        row.m.unwrap()
    )
}

/// The table line of a row of layers whose rows are split over the ranks, too.
fn split_line(row: &LayerRow) -> String {
    let (best, best_ms) = row.best_other().unwrap();
    let [none, flux, split] = ["none", "flux", "flux_sp"].map(|mode| row.ms[mode]);
    let (speed_up, hidden) = (row.speed_up("flux_sp").unwrap(), row.hidden("flux_sp").unwrap());
    format!(
        "| {} | {} | {} | {none:.3} | {best_ms:.3} ({best}) | {flux:.3} | {split:.3} | \
         {speed_up:.2} | {hidden:.2} |",
        row.model,
        row.dtype.as_deref().unwrap_or("bf16"),
        row.m.unwrap()
    )
}

/// The table line of a row of Megatron-Core's steps, without the difference of losses.
fn step_line(row: &LayerRow) -> String {
    let [theirs, flux] = ["megatron", "flux"].map(|mode| row.ms[mode]);
    let speed_up = row.speed_up("flux").unwrap();
    format!("| {} | {} | {theirs:.1} | {flux:.1} | {speed_up:.2} |", row.model, row.m.unwrap())
}

/// The table line of a row of a whole model's steps or tokens.
fn model_line(row: &LayerRow) -> String {
    let ms = |mode| row.ms.get(mode).map_or("-".to_owned(), |ms| format!("{ms:.2}"));
    let [torch, compiled, async_tp, flux, flux_compiled] =
        ["torch", "torch_compiled", "async_tp", "flux", "flux_compiled"].map(ms);
    let (size, speed_up) = (row.m.or(row.batch).unwrap(), row.speed_up("flux_compiled").unwrap());
    format!(
        "| {} | {} | {size} | {torch} | {compiled} | {async_tp} | {flux} | {flux_compiled} | \
         {speed_up:.2} |",
        row.model, row.phase
    )
}

/// The table line of a row of vLLM's answers. The speed-up is that of split rows, where timed.
fn answer_line(row: &LayerRow) -> String {
    const MODES: [&str; 3] = ["default", "flux", "flux_sp"];
    let [batch, input, output] = [row.batch, row.input, row.output].map(Option::unwrap);
    let case = row.case.as_ref().unwrap();
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let [theirs, flux, split] =
        MODES.map(|mode| or_dash(row.ms.get(mode).map(|ms| format!("{ms:.1}"))));
    let [their_step, step, split_step] =
        MODES.map(|mode| or_dash(row.step_ms.get(mode).map(|ms| format!("{ms:.2}"))));
    let speed_up = row.speed_up("flux_sp").or_else(|| row.speed_up("flux")).unwrap();
    format!(
        "| {case} | {batch} | {input} | {output} | {theirs} | {flux} | {split} | {speed_up:.2} | \
         {their_step} | {step} | {split_step} |"
    )
}

/// The lines of all rows of some records that have the mode which a line needs.
fn lines_of(files: &str, needs: &str, line: fn(&LayerRow) -> String) -> Vec<String> {
    rows_of(files, needs).iter().map(line).collect()
}

fn rows_of(files: &str, needs: &str) -> Vec<LayerRow> {
    let read = |file: &str| -> LayersReport {
        serde_json::from_slice(&fs::read(root().join(file)).unwrap()).unwrap()
    };
    let rows = files.split(' ').flat_map(|file| read(file).rows);
    rows.filter(|row| row.ms.contains_key(needs)).collect()
}

/// What precedes a table says where its figures stand: `flux-bench show ...` prints the table,
/// `figures of FILE ...` have every decimal figure, `unaligned ...`, `layers of FILE`, `kept layers
/// of FILE ...`, `split layers of FILE ...`, `steps of FILE`, `models of FILE ...` and `answers of
/// FILE` compute it.
#[test]
fn tables_of_documents_stand_in_the_results() {
    let mut kinds = [0; 9];
    for (name, document) in documents() {
        for (comment, table) in marked_tables(&document) {
            if comment.starts_with("flux-bench show ") && !comment.contains(" --svg ") {
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
                    table.len() > 2 && table[2..].iter().all(|line| lines.contains(line)),
                    "{name}: {}",
                    lines.join("\n")
                );
                kinds[3] += 1;
            } else if let Some(files) = comment.strip_prefix("kept layers of ") {
                let lines = lines_of(files, "flux_kept", kept_line);
                assert!(table[2..] == lines, "{name}: {}", lines.join("\n"));
                kinds[4] += 1;
            } else if let Some(files) = comment.strip_prefix("split layers of ") {
                let rows = rows_of(files, "flux_sp").into_iter();
                let decode = rows.filter(|row| row.phase == "decode");
                let lines: Vec<_> = decode.map(|row| split_line(&row)).collect();
                assert!(table[2..] == lines, "{name}: {}", lines.join("\n"));
                kinds[8] += 1;
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
            } else if let Some(files) = comment.strip_prefix("models of ") {
                let lines = lines_of(files, "flux_compiled", model_line);
                assert!(table[2..] == lines, "{name}: {}", lines.join("\n"));
                kinds[7] += 1;
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

/// The picture that this command writes to the file that its word `file` names.
fn simulated_picture(words: &[&str], file: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("picture.svg");
    let mut words = words.to_vec();
    words[file] = path.to_str().unwrap();
    let program = env!("CARGO_BIN_EXE_flux-bench");
    let done = std::process::Command::new(program).args(&words[1..]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    fs::read_to_string(path).unwrap()
}

/// What precedes a picture is the command that writes it.
#[test]
fn pictures_are_what_their_commands_write() {
    let mut written = Vec::new();
    for (name, document) in documents() {
        for part in document.split("<!-- ").skip(1) {
            let (command, rest) = part.split_once(" -->").unwrap();
            if !command.contains(" --svg ") {
                continue;
            }
            let words: Vec<&str> = command.split_whitespace().collect();
            let option = words.iter().position(|&word| word == "--svg").unwrap();
            let path = root().join(words[option + 1]);
            let file = path.file_name().unwrap().to_str().unwrap();
            assert!(
                rest.trim_start().lines().next().unwrap().contains(&format!("{file})")),
                "{name}: `{command}` stands before another picture"
            );
            let committed = fs::read_to_string(&path).unwrap_or_default();
            let again = match words[1] {
                "simulate" => simulated_picture(&words, option + 1),
                "show" => shown_picture(&shown(command)).unwrap(),
                // A call is measured once.
                _ => committed.clone(),
            };
            assert!(!again.is_empty() && committed == again, "{name}: run `{command}`");
            written.push(file.to_owned());
        }
    }
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap().to_owned();
        let is_picture = path.extension().is_some_and(|extension| extension == "svg");
        assert!(!is_picture || written.contains(&file), "{file} is in no document");
    }
    assert!(written.len() >= 3, "{written:?}");
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
