//! The page of the committed records, and of files that are none.

use super::*;
use std::path::Path;

fn results() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../results")
}

#[test]
fn the_page_has_every_record_and_row_and_is_a_function_of_the_files() {
    let page = made(&[results()]).unwrap();
    assert_eq!(page.left_out, Vec::<String>::new());
    assert!(page.html.len() < 2 << 20, "{} bytes", page.html.len());
    assert!(made(&[results()]).unwrap().html == page.html);
    let mut rows = 0;
    for path in paths(&[results()]).unwrap() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(page.html.contains(&format!("<details id=\"{name}\" class=\"record\"")), "{name}");
        let record = record::read(&path).unwrap();
        assert!(page.html.contains(&html_of(&record.origin().command)), "{name}");
        if matches!(record, Record::Ops(_)) {
            rows += record.rows();
        }
    }
    let legends = page.html.matches("<p class=\"legend\">").count();
    // The curve of flux alone has circles: two in each legend.
    assert_eq!(page.html.matches("<circle ").count(), rows + 2 * legends);
    for outside in ["src=", "url(", "@import", "<script", "<link rel=\"stylesheet\""] {
        assert!(!page.html.contains(outside), "{outside}");
    }
}

fn html_of(text: &str) -> String {
    crate::show::escape(text)
}

#[test]
fn a_file_that_is_no_record_is_named_and_the_rest_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let empty = made(&[folder.path().to_owned()]).err().unwrap().to_string();
    assert!(empty.ends_with("has no .json file: name one of records"), "{empty}");
    fs::write(path("b.json"), "{\"a\": NaN}").unwrap();
    let none = made(&[folder.path().to_owned()]).err().unwrap().to_string();
    assert!(none.starts_with("there is no record to show: ") && none.contains("NaN"), "{none}");
    fs::copy(results().join("h200-x4-nvlink.json"), path("a.json")).unwrap();
    fs::write(path("c.json"), "{\"transport\": \"<nvlink>\", \"rows\": [], \"schema\": 9}")
        .unwrap();
    let page = made(&[folder.path().to_owned()]).unwrap();
    assert_eq!(page.left_out.len(), 2, "{:?}", page.left_out);
    assert!(page.left_out[1].ends_with("has schema 9: this program reads 1 to 2"));
    assert!(page.html.contains("id=\"a\"") && page.html.contains("id=\"left-out\""));
    assert!(page.html.contains("b.json has NaN where a number belongs"));
}

#[test]
fn peers_stand_beside_the_ops_of_their_own_layers_alone() {
    let files =
        ["h200-x4-norm-nvlink", "h200-x4-ar-nvlink", "h200-x4-ar-peers", "h200-x4-norm-peers"]
            .map(|name| results().join(format!("{name}.json")));
    let records: Vec<Named> = files
        .iter()
        .map(|path| Named {
            name: path.file_stem().unwrap().to_string_lossy().into_owned(),
            record: record::read(path).unwrap(),
        })
        .collect();
    let with_norm = peers_of(&records, &records[0]).unwrap();
    assert!(with_norm.rows.iter().all(|row| row.head.model.ends_with("+norm")));
    let plain = peers_of(&records, &records[1]).unwrap();
    assert!(plain.rows.iter().all(|row| !row.head.model.ends_with("+norm")));
}

/// The page of these records, as `change` leaves each.
fn changed(names: &[&str], mut change: impl FnMut(&mut serde_json::Value)) -> String {
    let folder = tempfile::tempdir().unwrap();
    for name in names.iter().map(|name| format!("{name}.json")) {
        let text = fs::read(results().join(&name)).unwrap();
        let mut value = serde_json::from_slice(&text).unwrap();
        change(&mut value);
        fs::write(folder.path().join(&name), value.to_string()).unwrap();
    }
    let page = made(&[folder.path().to_owned()]).unwrap();
    assert_eq!(page.left_out, Vec::<String>::new());
    page.html
}

#[test]
fn a_layers_gain_has_the_colour_of_the_worse_of_the_base_and_the_best_other_way() {
    let html = changed(&["h200-x4-nvlink-layers"], |record| {
        let row = record["rows"].as_array_mut().unwrap().iter_mut();
        let row = row.filter(|row| row["phase"] == "decode").find(|row| row["m"] == 1).unwrap();
        row["dtype"] = "e4m3.row:bf16".into();
        row["ms"] = serde_json::json!({ "ar": 3.0, "two_shot": 1.0, "flux": 2.0 });
        row["spread"] = serde_json::json!({});
    });
    let both = "1.50x NCCL AllReduce,<br>0.50x two-shot AR";
    assert!(html.contains(&format!("<span class=\"behind\"><i>\u{25bc}</i> {both}</span>")));
    let column = |dtype| format!("llama3-70b {dtype}, 4 x NVIDIA H200, nvlink</th>");
    assert!(html.contains(&column("bf16")) && html.contains(&column("e4m3.row:bf16")));
}

#[test]
fn hosts_of_one_machine_and_changed_trees_are_said_to_be() {
    let page = |machines: u32, commit: &str| {
        changed(&["h200-x4-hosts2-mixed"], |record| {
            record["machines"] = machines.into();
            record["commit"] = commit.into();
        })
    };
    let (one, two) = (page(1, "0123456789ab-dirty"), page(2, "0123456789ab"));
    assert!(one.contains("hosts of several GPUs (one machine acts as 2 hosts): faster"));
    assert!(one.contains("0123456789-dirty, not reproducible"));
    assert!(one.contains("<code>0123456789ab-dirty</code> (not reproducible)"));
    assert!(one.contains("Nothing on this page is simulated."));
    assert!(!two.contains("acts as") && !two.contains("not reproducible"));
}

#[test]
fn ops_and_models_have_their_least_and_most_gain_over_records_without_options() {
    let mut gains = Vec::new();
    let html = changed(&["h200-x4-nvlink", "h200-x4-portable-nvlink"], |record| {
        let rows = record["rows"].as_array().unwrap().iter();
        let few = rows.filter(|row| {
            row["op"] == "ag_gemm" && row["model"] == "gpt3" && row["m"].as_u64().unwrap() <= 256
        });
        let ms = |row: &serde_json::Value, of: &str| row[of]["median"].as_f64().unwrap();
        gains.push(few.map(|row| ms(row, "t_serial_ms") / ms(row, "t_op_ms")).collect::<Vec<_>>());
    });
    let [least, most] = [f64::min, f64::max].map(|of| gains[0].iter().copied().reduce(of).unwrap());
    let line = html.split("<td>ag_gemm</td><td>gpt3</td>").nth(1).unwrap();
    let range = format!("{least:.2}x to {most:.2}x");
    assert!(line.lines().next().unwrap().contains(&range), "{range}: {line:.200}");
    let plain = changed(&["h200-x4-portable-nvlink"], |_| ());
    assert!(!plain.contains("By op and model"));
}
