//! Records of a route.

/// Where a parcel lies in its source's half: `rows` rows of `width` bytes, `pitch` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Bytes from the start of the half.
    pub offset: u64,
    /// Rows.
    pub rows: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Bytes from a row to the next.
    pub pitch: u64,
}

/// Where a parcel comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The caller's shard, from the call's begin on.
    Shard {
        /// First row.
        row: u64,
        /// Bytes before the first column.
        before: u64,
    },
    /// The outbox, at the same place as in the half, from when the kernel has raised the reader's
    /// signal.
    Outbox,
}

/// Who reads a parcel, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reader {
    /// The rank.
    pub rank: u32,
    /// The signal of its pad that says that the parcel is there.
    pub signal: u32,
    /// Bytes from the start of the half of its data region.
    pub offset: u64,
    /// Bytes from a row to the next there.
    pub pitch: u64,
    /// Step of the schedule at which it goes there.
    pub step: u32,
}

/// A piece that travels as one, with one signal for each reader.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parcel {
    /// Where it comes from.
    pub origin: Origin,
    /// Where it lies on its way.
    pub block: Block,
    /// Who reads it.
    pub readers: Vec<Reader>,
}

/// A parcel as this rank receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incoming {
    /// The rank that sends it.
    pub source: u32,
    /// Its number among all that the source sends.
    pub index: u32,
    /// Where it lies in the source's half.
    pub block: Block,
    /// Where it goes.
    pub reader: Reader,
}
