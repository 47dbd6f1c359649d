//! Records of a route.

/// A block of bytes in its source's half: `rows` rows of `width` bytes, `pitch` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Bytes from the start of the half.
    pub offset: u64,
    /// Rows.
    pub rows: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Bytes from one row to the next.
    pub pitch: u64,
}

impl Block {
    /// This block with `next`, where that lies right below or right beside it.
    fn joined(&self, next: &Self) -> Option<Self> {
        let (below, beside) = (self.offset + self.rows * self.pitch, self.offset + self.width);
        let width = self.width + next.width;
        match self.pitch == next.pitch {
            true if self.width == next.width && next.offset == below => {
                Some(Self { rows: self.rows + next.rows, ..*self })
            }
            true if self.rows == next.rows && next.offset == beside && width <= self.pitch => {
                Some(Self { width, ..*self })
            }
            _ => None,
        }
    }

    /// The same bytes in fewer blocks.
    pub(super) fn join(mut blocks: Vec<Self>) -> Vec<Self> {
        blocks.sort_unstable_by_key(|block| block.offset);
        let mut all: Vec<Self> = Vec::with_capacity(1);
        for mut block in blocks.into_iter().filter(|block| !block.is_empty()) {
            while let Some(joined) = all.last().and_then(|last| last.joined(&block)) {
                all.pop();
                block = joined;
            }
            all.push(block);
        }
        all
    }

    /// Whether there is nothing to copy: a signal may announce nothing.
    pub const fn is_empty(&self) -> bool {
        self.rows == 0 || self.width == 0
    }
}

/// Origin of a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The caller's shard, from the begin of the call.
    Shard {
        /// First row.
        row: u64,
        /// Bytes before the first column.
        before: u64,
    },
    /// The outbox, at the half's offset, after the kernel has raised the readers' signals.
    Outbox,
    /// The same, of tiles to which the kernel has added what parcels with smaller numbers brought.
    Results,
}

/// A reader of a parcel, and the destination there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reader {
    /// The rank.
    pub rank: u32,
    /// The signal of its pad that announces the parcel.
    pub signal: u32,
    /// Bytes, modulo 2^64, from a block's offset to that in its half.
    pub shift: u64,
    /// Step of the schedule.
    pub step: u32,
}

/// Bytes that travel together, with one signal for each reader.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parcel {
    /// Where it comes from.
    pub origin: Origin,
    /// Its bytes in the source's half.
    pub blocks: Vec<Block>,
    /// Its readers.
    pub readers: Vec<Reader>,
}

/// A parcel as its reader receives it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Incoming {
    /// The sending rank.
    pub source: u32,
    /// Its index among all parcels of the source.
    pub index: u32,
    /// Its bytes in the source's half.
    pub blocks: Vec<Block>,
    /// Its destination.
    pub reader: Reader,
}
