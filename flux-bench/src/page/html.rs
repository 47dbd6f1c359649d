//! Markup.
//!
//! Invariant: texts are escaped here, and nothing refers to another file.

use crate::show::{Chart, escape};
use std::fmt::{Display, Write as _};

const STYLE: &str = include_str!("page.css");

/// Markup that grows.
#[derive(Default)]
pub(super) struct Html(String);

/// How a table's column stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column<'a> {
    Words(&'a str),
    Number(&'a str),
}

/// A column, and its cell of a row.
pub(super) type Of<'a, R> = (Column<'a>, &'a dyn Fn(&R) -> Cell);

/// A cell: plain text, or markup that is made here.
#[derive(Clone, Debug)]
pub(super) enum Cell {
    Text(String),
    Code(String),
    Link {
        to: String,
        words: String,
    },
    /// A ratio with a sign: above 1 is ahead.
    Gain(Option<f64>),
    /// Lines about ratios, with the sign of the least of them.
    Gains {
        least: f64,
        lines: Vec<String>,
    },
}

impl<T: Display> From<T> for Cell {
    fn from(words: T) -> Self {
        Self::Text(words.to_string())
    }
}

impl Html {
    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn push(&mut self, other: &Self) {
        self.0 += &other.0;
    }

    /// A paragraph; what stands between backticks is code.
    pub(super) fn paragraph(&mut self, class: &str, words: &str) {
        let _ = writeln!(self.0, "<p class=\"{class}\">{}</p>", marked(words));
    }

    pub(super) fn heading(&mut self, words: &str) {
        let _ = writeln!(self.0, "<h3>{}</h3>", escape(words));
    }

    pub(super) fn list(&mut self, items: &[impl AsRef<str>]) {
        self.0 += "<ul>\n";
        for item in items {
            let _ = writeln!(self.0, "<li>{}</li>", marked(item.as_ref()));
        }
        self.0 += "</ul>\n";
    }

    /// Terms with what they mean.
    pub(super) fn terms(&mut self, terms: &[(&str, &str)]) {
        self.0 += "<dl>\n";
        for (term, meaning) in terms {
            let _ = writeln!(
                self.0,
                "<div><dt>{}</dt><dd>{}</dd></div>",
                escape(term),
                marked(meaning)
            );
        }
        self.0 += "</dl>\n";
    }

    pub(super) fn section(&mut self, id: &str, title: &str, content: &Self) {
        let title = escape(title);
        let _ = writeln!(self.0, "<section id=\"{id}\"><h2>{title}</h2>\n{}</section>", content.0);
    }

    /// Content under a line that opens and closes it.
    pub(super) fn details(
        &mut self,
        (id, class): (&str, &str),
        open: bool,
        line: &Self,
        content: &Self,
    ) {
        let id = if id.is_empty() { String::new() } else { format!(" id=\"{}\"", escape(id)) };
        let open = if open { " open" } else { "" };
        let _ = writeln!(
            self.0,
            "<details{id} class=\"{class}\"{open}><summary>{}</summary>\n{}</details>",
            line.0, content.0
        );
    }

    /// Words side by side, each in a class.
    pub(super) fn spans(&mut self, words: &[(&str, &str)]) {
        for (class, words) in words {
            let _ = write!(self.0, "<span class=\"{class}\">{}</span> ", marked(words));
        }
    }

    /// A table of rows, column by column.
    pub(super) fn columns<R>(&mut self, rows: &[R], columns: &[Of<'_, R>]) {
        let cells: Vec<Vec<Cell>> =
            rows.iter().map(|row| columns.iter().map(|(_, cell)| cell(row)).collect()).collect();
        let columns: Vec<Column<'_>> = columns.iter().map(|(column, _)| *column).collect();
        self.table(&columns, &cells);
    }

    /// Content that `words` open and close.
    pub(super) fn numbers(&mut self, words: &str, content: &Self) {
        let mut line = Self::default();
        line.spans(&[("", words)]);
        self.details(("", "numbers"), false, &line, content);
    }

    pub(super) fn table(&mut self, columns: &[Column<'_>], rows: &[Vec<Cell>]) {
        self.0 += "<div class=\"scroll\" tabindex=\"0\"><table><thead><tr>";
        for column in columns {
            let (class, words) = match column {
                Column::Words(words) => ("", words),
                Column::Number(words) => (" class=\"n\"", words),
            };
            let _ = write!(self.0, "<th scope=\"col\"{class}>{}</th>", escape(words));
        }
        self.0 += "</tr></thead><tbody>\n";
        for row in rows {
            self.0 += "<tr>";
            for (cell, column) in row.iter().zip(columns) {
                let class = if matches!(column, Column::Number(_)) { " class=\"n\"" } else { "" };
                let _ = write!(self.0, "<td{class}>{}</td>", cell.markup());
            }
            self.0 += "</tr>\n";
        }
        self.0 += "</tbody></table></div>\n";
    }

    /// Charts side by side; `rows` is the number of rows that they show.
    pub(super) fn charts(&mut self, class: &str, rows: usize, charts: &[Chart]) {
        let _ = writeln!(self.0, "<div class=\"{class}\" data-rows=\"{rows}\">");
        for Chart { title, subtitle, svg } in charts {
            let (title, subtitle) = (escape(title), escape(subtitle));
            let _ = writeln!(
                self.0,
                "<figure><figcaption><b>{title}</b> <span>{subtitle}</span></figcaption>{svg}\
                 </figure>"
            );
        }
        self.0 += "</div>\n";
    }

    /// A program of the page.
    pub(super) fn script(&mut self, program: &str) {
        let _ = writeln!(self.0, "<script>\n{program}</script>");
    }

    /// Samples with their names.
    pub(super) fn legend(&mut self, entries: &[Chart]) {
        self.0 += "<p class=\"legend\">";
        for Chart { title, svg, .. } in entries {
            let _ = write!(self.0, "<span>{svg} {}</span> ", escape(title));
        }
        self.0 += "</p>\n";
    }
}

impl Cell {
    /// A link to what has this name on the page.
    pub(super) fn link(name: &str) -> Self {
        Self::Link { to: name.to_owned(), words: name.to_owned() }
    }

    fn markup(&self) -> String {
        match self {
            Self::Text(words) => escape(words),
            Self::Code(words) => format!("<code>{}</code>", escape(words)),
            Self::Link { to, words } => {
                format!("<a href=\"#{}\">{}</a>", escape(to), escape(words))
            }
            Self::Gain(None) => "-".to_owned(),
            Self::Gain(Some(gain)) => signed(*gain, &format!("{gain:.2}x")),
            Self::Gains { least, lines } => {
                let lines: Vec<String> = lines.iter().map(|line| escape(line)).collect();
                signed(*least, &lines.join(",<br>"))
            }
        }
    }
}

/// Markup in the colour of a ratio, behind its sign.
fn signed(gain: f64, markup: &str) -> String {
    let (class, sign) = match gain {
        gain if gain >= 1.005 => ("ahead", "\u{25b2}"),
        gain if gain < 0.995 => ("behind", "\u{25bc}"),
        _ => ("even", "="),
    };
    format!("<span class=\"{class}\"><i>{sign}</i> {markup}</span>")
}

/// Text whose parts between backticks are code.
fn marked(words: &str) -> String {
    let mut out = String::new();
    for (i, part) in escape(words).split('`').enumerate() {
        let _ = match i % 2 {
            0 => write!(out, "{part}"),
            _ => write!(out, "<code>{part}</code>"),
        };
    }
    out
}

/// A whole page: title, links to its sections, introduction and sections.
pub(super) fn document(
    title: &str,
    sections: &[(&str, &str)],
    intro: &Html,
    page: &Html,
) -> String {
    let mut links = String::new();
    for (id, words) in sections {
        let _ = write!(links, "<a href=\"#{id}\">{}</a>", escape(words));
    }
    let (title, intro, page) = (escape(title), &intro.0, &page.0);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style></head>\n<body>\n\
         <header><h1>{title}</h1>\n{intro}<nav>{links}</nav></header>\n<main>\n{page}</main>\n\
         </body></html>\n"
    )
}
