//! Records of a route.

/// Location of a parcel in its source's half: `rows` rows of `width` bytes, `pitch` bytes apart.
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
    /// The outbox, at the half's offset, after the kernel has raised the reader's signal.
    Outbox,
}

/// A reader of a parcel, and the destination there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reader {
    /// The rank.
    pub rank: u32,
    /// The signal of its pad that announces the parcel.
    pub signal: u32,
    /// Bytes from the start of its half.
    pub offset: u64,
    /// Bytes from one row to the next at the destination.
    pub pitch: u64,
    /// Step of the schedule.
    pub step: u32,
}

/// Bytes that travel together, with one signal for each reader.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parcel {
    /// Where it comes from.
    pub origin: Origin,
    /// Its location in the source's half.
    pub block: Block,
    /// Its readers.
    pub readers: Vec<Reader>,
}

/// A parcel as its reader receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incoming {
    /// The sending rank.
    pub source: u32,
    /// Its index among all parcels of the source.
    pub index: u32,
    /// Its location in the source's half.
    pub block: Block,
    /// Its destination.
    pub reader: Reader,
}
