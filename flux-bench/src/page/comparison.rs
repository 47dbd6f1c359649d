//! Two records beside each other.

use super::html::{self, Cell, Column, Html};
use crate::compare::{Bound, COLUMNS, CONTROL, Comparison};

pub(super) fn page(comparison: &Comparison, bound: Bound) -> String {
    let mut intro = Html::default();
    intro.paragraph("lede", &comparison.verdict(bound));
    intro.list(&comparison.notes());
    intro.paragraph("note", CONTROL);
    let mut rows = comparison.pairs.iter().collect::<Vec<_>>();
    rows.sort_by(|a, b| b.change().total_cmp(&a.change()));
    let columns: Vec<Column<'_>> = COLUMNS
        .into_iter()
        .enumerate()
        .map(|(i, name)| if i == 0 || i == 7 { Column::Words(name) } else { Column::Number(name) })
        .collect();
    let cells: Vec<Vec<Cell>> = rows
        .into_iter()
        .map(|pair| Comparison::cells(pair, bound).into_iter().map(Cell::Text).collect())
        .collect();
    let (mut table, mut page) = (Html::default(), Html::default());
    table.table(&columns, &cells);
    page.section("rows", "Rows, the most slowed first", &table);
    html::document("flux: two records", &[("rows", "Rows")], &intro, &page)
}
