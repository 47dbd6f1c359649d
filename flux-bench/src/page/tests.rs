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
