//! Calls with other rows in each, the op beside the serial path.

use super::{Head, Origin, Placement, columns, ms, setup, what_it_shows};
use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// Version of a record's format.
pub(crate) const SERVING_SCHEMA: u32 = 1;
/// Bytes that a process or a device may hold more: pools of the driver and of the allocator.
const SLACK: u64 = 16 << 20;

/// Results of `bench --trace-m`, with what is needed to judge and repeat them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServingReport {
    /// `SERVING_SCHEMA`.
    pub schema: u32,
    /// Where it was measured, and how it is repeated: `device` to `command`.
    #[serde(flatten)]
    pub origin: Origin,
    /// Transport that carried the op.
    pub transport: String,
    /// What the ranks were, and where: the fields `ranks`, `hosts` and `machines`.
    #[serde(flatten)]
    pub placement: Placement,
    /// Version of NCCL, of the serial path.
    pub nccl: Option<String>,
    /// One per op and shape.
    pub serving: Vec<ServingRow>,
}

/// One op over all calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServingRow {
    /// What it is of: `op` to `dtype`; `m` is the op's most rows.
    #[serde(flatten)]
    pub head: Head,
    /// Where the rows are from: a file's name, or `mix`.
    pub trace: String,
    pub calls: u64,
    /// Of all calls together.
    pub rows: u64,
    /// How many numbers of rows there are.
    pub different_rows: u64,
    /// All calls of the op, each as long as on the slowest rank.
    pub total_op_ms: f64,
    /// All calls of the serial path.
    pub total_serial_ms: f64,
    /// The host's time of a call of the op, on the slowest rank: to enqueue it, or to compute it.
    pub host_us: HostTime,
    /// The same of the serial path.
    pub host_serial_us: HostTime,
    /// Calls of the op, over all ranks, that the device may have waited for.
    pub late: u64,
    pub memory: HeldMemory,
    /// Elements that were compared with the fp64 reference, over all ranks; some of each call.
    pub checked: u64,
    /// Largest deviation of one, over the largest of them.
    pub max_rel_err: f64,
    /// Whether all of them were within the derived bound.
    pub verified: bool,
}

/// Percentiles over calls, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostTime {
    pub p50: f64,
    pub p99: f64,
}

/// Memory of the ranks where it has grown most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldMemory {
    /// In use on a rank's device; 0 on the host.
    pub device: Held,
    /// Resident memory of a process.
    pub host: Held,
}

/// Bytes before the first call, when half of the calls were made, and after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub before: u64,
    pub amid: u64,
    pub after: u64,
    /// What the second half of the calls added, without what the communicator accounts for.
    pub grown: u64,
}

impl Held {
    /// Of three moments; from the second to the third the communicator says to hold `accounted`
    /// more.
    pub(crate) fn new([before, amid, after]: [u64; 3], accounted: u64) -> Self {
        Self { before, amid, after, grown: after.saturating_sub(amid).saturating_sub(accounted) }
    }
}

impl ServingReport {
    /// Whether all elements that were compared were right, and some of each call were.
    pub fn verified(&self) -> bool {
        self.serving.iter().all(|row| row.verified && row.checked >= row.calls)
    }

    /// # Errors
    /// A row whose calls took more and more memory.
    pub(crate) fn memory_has_stayed(&self) -> anyhow::Result<()> {
        for row in &self.serving {
            for (held, of) in [(row.memory.device, "device"), (row.memory.host, "host")] {
                let (head, calls) = (&row.head, row.calls - row.calls / 2);
                ensure!(
                    held.grown <= SLACK,
                    "{head}: {of} memory grew by {} bytes in {calls} calls, from {}",
                    held.grown,
                    held.amid
                );
            }
        }
        Ok(())
    }

    pub(crate) fn table(&self) -> String {
        let first = self.serving.first();
        let on = (&*self.transport, self.placement);
        let setup = setup(&self.origin, on, self.nccl.as_ref(), first.map(|row| &row.head));
        let mib = |held: Held| {
            [held.before, held.amid, held.after].map(|bytes| (bytes >> 20).to_string())
        };
        let table = columns(
            &self.serving,
            (["op", "model", "most m", "n", "k"], |row| &row.head),
            &[
                ("calls", &|row| row.calls.to_string()),
                ("op ms", &|row| ms(row.total_op_ms)),
                ("serial ms", &|row| ms(row.total_serial_ms)),
                ("serial/op", &|row| format!("{:.3}", row.total_serial_ms / row.total_op_ms)),
                ("host p50 us", &|row| format!("{:.1}", row.host_us.p50)),
                ("p99 us", &|row| format!("{:.1}", row.host_us.p99)),
                ("late", &|row| row.late.to_string()),
                ("device MiB", &|row| mib(row.memory.device).join(" > ")),
                ("host MiB", &|row| mib(row.memory.host).join(" > ")),
                ("verified", &|row| {
                    if row.verified { row.checked.to_string() } else { "NO".to_owned() }
                }),
            ],
        );
        let trace = first.map_or_else(String::new, |row| {
            format!("{}, {} numbers of rows in {} calls", row.trace, row.different_rows, row.calls)
        });
        format!(
            "{setup}rows of {trace}; total times on the slowest rank; memory before, amid and after; \
             elements verified\n{}\n{table}",
            what_it_shows(&self.transport)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{DType, OpKind, Problem, WorldSize};

    fn report(device: Held, host: Held) -> ServingReport {
        let problem = Problem::new(
            OpKind::GemmAllReduce,
            8192,
            64,
            64,
            DType::Bf16,
            WorldSize::new(2).unwrap(),
        )
        .unwrap();
        let row = ServingRow {
            head: Head::new("gpt3", &problem),
            trace: "mix".to_owned(),
            calls: 100,
            rows: 1000,
            different_rows: 7,
            total_op_ms: 50.0,
            total_serial_ms: 75.0,
            host_us: HostTime { p50: 3.0, p99: 9.5 },
            host_serial_us: HostTime { p50: 4.0, p99: 5.0 },
            late: 2,
            memory: HeldMemory { device, host },
            checked: 800,
            max_rel_err: 1e-3,
            verified: true,
        };
        let origin = Origin::of_a_test("NVIDIA H200", 2, "flux-bench bench --trace-m mix");
        ServingReport {
            schema: SERVING_SCHEMA,
            origin,
            transport: "nvlink".to_owned(),
            placement: Placement::THREADS,
            nccl: None,
            serving: vec![row],
        }
    }

    #[test]
    fn memory_that_grows_while_calls_are_made_is_an_error_that_names_it() {
        let stays = Held::new([1 << 30, 2 << 30, (2 << 30) + SLACK], 0);
        let grows = Held::new([1 << 30, 2 << 30, (2 << 30) + SLACK + 1], 0);
        assert!(report(stays, stays).memory_has_stayed().is_ok());
        assert!(
            report(Held::new([0, 0, SLACK + 9], 9), stays).memory_has_stayed().is_ok(),
            "the communicator accounts for it"
        );
        assert!(
            report(Held::new([0, 9, 1], 0), stays).memory_has_stayed().is_ok(),
            "less is no growth"
        );
        for (report, of) in [(report(grows, stays), "device"), (report(stays, grows), "host")] {
            let why = report.memory_has_stayed().unwrap_err().to_string();
            assert_eq!(
                why,
                format!(
                    "gemm_ar gpt3 m 8192: {of} memory grew by 16777217 bytes in 50 calls, from \
                     2147483648"
                )
            );
        }
    }

    #[test]
    fn a_call_without_a_checked_element_is_not_verified() {
        let held = Held::new([0; 3], 0);
        let mut report = report(held, held);
        assert!(report.verified() && report.table().contains(" 1.500 "), "{}", report.table());
        report.serving[0].checked = 99;
        assert!(!report.verified());
        (report.serving[0].checked, report.serving[0].verified) = (800, false);
        assert!(
            !report.verified() && report.table().trim_end().ends_with("NO"),
            "{}",
            report.table()
        );
    }

    #[test]
    fn a_record_survives_the_trip_through_its_file() {
        let report = report(Held::new([1, 2, 3], 0), Held::new([4, 5, 6], 0));
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<ServingReport>(&json).unwrap(), report);
    }
}
