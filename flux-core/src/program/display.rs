//! A tile program as text, for failed properties and for people.

use super::{Await, Forward, NONE, RowSource, Sink, TileProgram, Transfer, WorkItem};
use std::fmt;

impl fmt::Display for TileProgram {
    /// A header line, then a numbered line for each item, transfer and forward.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "rank {} of {}, tile {}: {} items, {} transfers, {} signals, {} counters, {} slots per \
             source",
            self.rank,
            self.problem,
            self.tile,
            self.items.len(),
            self.transfers.len(),
            self.signals,
            self.counters,
            self.slots_per_source
        )?;
        for (index, item) in self.items.iter().enumerate() {
            write!(f, "  item {index:>4}: ")?;
            self.fmt_item(f, item)?;
        }
        for (index, transfer) in self.transfers.iter().enumerate() {
            write!(f, "  move {index:>4}: ")?;
            self.fmt_transfer(f, transfer)?;
        }
        for (index, Forward { from, awaits, to }) in self.forwards.iter().enumerate() {
            write!(
                f,
                "  pass {index:>4}: of place {from} await {}@{} ",
                awaits.signal, awaits.peer
            )?;
            self.fmt_transfer(f, to)?;
        }
        Ok(())
    }
}

impl TileProgram {
    /// Broken programs are printed too: nothing here may panic.
    fn fmt_item(&self, f: &mut fmt::Formatter<'_>, item: &WorkItem) -> fmt::Result {
        let (row_end, col_end) =
            (item.row.saturating_add(item.rows), item.col.saturating_add(item.cols));
        let from = match item.a_source {
            RowSource::Caller => "x shard",
            RowSource::Gather => "gather place",
        };
        write!(f, "[{}..{row_end}, {}..{col_end}]", item.row, item.col)?;
        if item.sink == Sink::ReduceRows {
            f.write_str(" reduced")?;
        } else if item.sink == Sink::Copy {
            f.write_str(" copied")?;
        } else {
            write!(f, " of {from} {}", item.a_outer)?;
        }
        if item.sink == Sink::Partial || item.parts > 0 {
            write!(f, " steps {}..{}", item.k_first, item.k_first.saturating_add(item.k_steps))?;
        }
        self.fmt_awaits(f, item.await_first, item.await_count)?;
        self.fmt_awaits(f, item.late_first, item.late_count)?;
        if item.parts > 0 {
            write!(f, " + {} parts from split-K slot {}", item.parts, item.part)?;
        }
        if item.partials > 0 && item.sink != Sink::ReduceRows {
            write!(f, " + {} partials from slot {}", item.partials, item.partial_slot)?;
        }
        match item.sink {
            Sink::Store => write!(f, " -> y shard {}", item.out_outer)?,
            Sink::Send => write!(f, " -> rank {} slot {}", item.dest, item.slot)?,
            Sink::Reduce if item.raise != NONE => f.write_str(" -> y and peers")?,
            Sink::Reduce | Sink::Copy => f.write_str(" -> y")?,
            Sink::Partial => write!(f, " -> split-K slot {}", item.part)?,
            Sink::Scatter => f.write_str(" -> owners")?,
            Sink::ReduceRows => write!(f, " of {} ranks -> y", item.partials)?,
        }
        if item.raise != NONE {
            write!(f, " raise {}", item.raise)?;
            if item.counter != NONE {
                write!(f, " after {} in counter {}", item.raise_after, item.counter)?;
            }
        }
        writeln!(f)
    }

    fn fmt_transfer(&self, f: &mut fmt::Formatter<'_>, transfer: &Transfer) -> fmt::Result {
        let Transfer { dest, place, row, rows, col, cols, raise, step } = transfer;
        let (end, col_end) = (row.saturating_add(*rows), col.saturating_add(*cols));
        write!(f, "step {step} rows {row}..{end}")?;
        if *cols != self.problem.k_local(self.rank) {
            write!(f, " cols {col}..{col_end}")?;
        }
        writeln!(f, " -> rank {dest} place {place} raise {raise}")
    }

    fn fmt_awaits(&self, f: &mut fmt::Formatter<'_>, first: u32, count: u32) -> fmt::Result {
        let (from, to) = (first as usize, (first as usize).saturating_add(count as usize));
        let Some(awaits) = self.awaits.get(from..to) else {
            return write!(f, " await entries {first}+{count}?");
        };
        f.write_str(if awaits.is_empty() { "" } else { " await" })?;
        for Await { signal, peer, k_step } in awaits {
            write!(f, " {signal}@{peer}")?;
            if *k_step > 0 {
                write!(f, " (step {k_step})")?;
            }
        }
        Ok(())
    }
}
