//! The time line of a worker in one call: what it does, from when to when.
//!
//! Invariant: spans of a track are in order without gap or overlap, none is empty, and two that
//! follow each other differ in their phase.

use std::time::Duration;

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It waits: for signals of peers, or of other workers.
    Wait,
    /// It multiplies a tile.
    Multiply,
    /// It adds partial tiles, split-K partials or scattered rows, or copies finished results.
    Add,
    /// It stores or sends a result, and nothing of the above.
    Send,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Self; 4] = [Self::Wait, Self::Multiply, Self::Add, Self::Send];

    /// The phase in a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Multiply => "multiply",
            Self::Add => "add",
            Self::Send => "send",
        }
    }
}

/// A stretch of one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The phase.
    pub phase: Phase,
    /// When it begins.
    pub begin: Duration,
    /// When it ends.
    pub end: Duration,
}

/// What one worker does from its begin to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Track {
    begin: Duration,
    spans: Vec<Span>,
}

impl Track {
    /// A worker that begins.
    pub const fn new(begin: Duration) -> Self {
        Self { begin, spans: Vec::new() }
    }

    /// The worker is in `phase` from the track's end to `end`; nothing where that is past.
    pub fn until(&mut self, phase: Phase, end: Duration) {
        let begin = self.end();
        if end <= begin {
            return;
        }
        match self.spans.last_mut() {
            Some(last) if last.phase == phase => last.end = end,
            _ => self.spans.push(Span { phase, begin, end }),
        }
    }

    /// When the worker begins.
    pub const fn begin(&self) -> Duration {
        self.begin
    }

    /// The end of the last span.
    pub fn end(&self) -> Duration {
        self.spans.last().map_or(self.begin, |span| span.end)
    }

    /// The spans, in order.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The time in a phase.
    pub fn total(&self, phase: Phase) -> Duration {
        let of_phase = self.spans.iter().filter(|span| span.phase == phase);
        of_phase.map(|span| span.end.saturating_sub(span.begin)).sum()
    }
}
