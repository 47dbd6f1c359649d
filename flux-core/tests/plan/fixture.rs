//! The rows of the fixtures under `results/`.

use flux_core::machine::Machine;
use flux_core::plan::{Plan, Target};
use flux_core::{DType, OpKind, Problem, WorldSize};
use std::collections::HashMap;
use std::path::Path;

/// One row, by column name.
pub(crate) struct Row(HashMap<String, String>);

impl Row {
    pub(crate) fn get(&self, column: &str) -> &str {
        self.0.get(column).unwrap_or_else(|| panic!("there is no column {column}"))
    }

    pub(crate) fn number(&self, column: &str) -> f64 {
        self.get(column).parse().unwrap()
    }

    pub(crate) fn plan(&self) -> Plan {
        self.get("plan").parse().unwrap_or_else(|error| panic!("{}: {error}", self.get("plan")))
    }

    pub(crate) fn problem(&self) -> Problem {
        let op = if self.get("op") == "ag_gemm" {
            OpKind::AllGatherGemm
        } else {
            OpKind::GemmReduceScatter
        };
        let dtype = if self.get("dtype") == "bf16" { DType::Bf16 } else { DType::F16 };
        let extent = |column| self.get(column).parse().unwrap();
        let world = WorldSize::new(extent("world") as u32).unwrap();
        Problem::new(op, extent("m"), extent("n"), extent("k"), dtype, world).unwrap()
    }

    /// The row's machine, over peer memory.
    pub(crate) fn target(&self) -> Target {
        let machine =
            if self.get("device").contains("H200") { Machine::H200 } else { Machine::H100 };
        // A GPU by itself has every row from the start.
        let fast = Machine {
            link_bytes_per_us: 1 << 40,
            both_ways_bytes_per_us: 1 << 40,
            push_ns: 0,
            push_round_ns: 0,
            copy_ns: 0,
            copy_begins_ns: 0,
            push_begins_ns: 0,
            signal_ns: 0,
            ..machine
        };
        Target::peer_memory(
            if self.get("transport") == "local" { fast } else { machine },
            &self.problem(),
        )
    }
}

/// All rows of a fixture.
pub(crate) fn rows(name: &str) -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("results").join(name);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let columns: Vec<&str> = lines.next().unwrap().split(',').collect();
    let row = |line: &str| {
        Row(columns
            .iter()
            .map(|&column| column.to_owned())
            .zip(line.split(',').map(str::to_owned))
            .collect())
    };
    lines.map(row).collect()
}
