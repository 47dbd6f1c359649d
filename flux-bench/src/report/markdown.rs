//! Tables of Markdown.

use std::ops::Range;

/// A table with these columns, of which those in `numbers` are aligned to the right.
pub(crate) fn markdown_table(
    columns: &[&str],
    numbers: Range<usize>,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let line = |cells: &str| format!("| {cells} |\n");
    let rule = |column| if numbers.contains(&column) { "--:|" } else { "---|" };
    let rule: String = (0..columns.len()).map(rule).collect();
    let rows: String = rows.into_iter().map(|cells| line(&cells.join(" | "))).collect();
    format!("{}|{rule}\n{rows}", line(&columns.join(" | ")))
}
