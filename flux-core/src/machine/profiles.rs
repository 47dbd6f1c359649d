//! Profiles of machines: measured ones, and those that follow from data sheets.
//!
//! Invariant: where no record has a rate, it is the data sheet's times what H200 or H100 reach of
//! theirs.

use super::Machine;
use crate::tile::Generation;

/// What a data sheet says of a GPU.
struct DataSheet {
    multiprocessors: u32,
    /// Dense 16-bit operands with fp32 accumulation.
    ops_per_cycle: u64,
    boost_mhz: u64,
    memory_gb_per_s: u64,
    wires: Wires,
}

/// Links of a GPU, in GB/s in one direction.
enum Wires {
    NvLink(u64),
    Pcie(u64),
}

/// PCIe of generation 4 with 16 lanes.
const PCIE_4: Wires = Wires::Pcie(32);
/// PCIe of generation 5 with 16 lanes.
const PCIE_5: Wires = Wires::Pcie(64);

impl Machine {
    /// H200 (SXM) on one switch.
    pub const H200: Self = Self {
        name: "H200",
        gpu: "H200",
        wires: "NVLink",
        host_staged: false,
        generation: Generation::Hopper,
        multiprocessors: 132,
        ops_per_cycle: 4096,
        clock_mhz: 1460,
        memory_bytes_per_us: 4_250_000,
        l2_bytes_per_us: 9_830_000,
        link_bytes_per_us: 370_000,
        both_ways_bytes_per_us: 370_000,
        signal_ns: 1140,
        begin_ns: 3500,
        end_ns: 7500,
        tile_ns: 2000,
        add_bytes_per_us: 80_000,
        push_begins_ns: 2000,
        push_ns: 2700,
        push_round_ns: 400,
        copy_begins_ns: 15_000,
        copy_ns: 4400,
        message_ns: 30_000,
        message_bytes_per_us: 17_000,
        staged_bytes_per_us: 34_000,
        staged_total_bytes_per_us: 104_000,
    };

    /// H100 (SXM) on one switch: an H200 with the memory rate of its data sheet, scaled as the
    /// H200's.
    pub const H100: Self =
        Self { name: "H100", gpu: "H100", memory_bytes_per_us: 2_966_000, ..Self::H200 };

    /// Two H100 that reach host memory only (results/h100-x2-links.txt). They wait more than over
    /// NVLink, so the clock is higher (results/h100-x2-pcie.json).
    pub const H100_PAIR_BY_HOST: Self = Self {
        name: "H100-pair-by-host",
        wires: "PCIe",
        host_staged: true,
        link_bytes_per_us: 54_000,
        both_ways_bytes_per_us: 34_000,
        copy_ns: 0,
        clock_mhz: 1540,
        ..Self::H100
    };

    /// H800: an H100 with 400 GB/s of NVLink for 900.
    pub const H800: Self = Self {
        name: "H800",
        gpu: "H800",
        link_bytes_per_us: 164_000,
        both_ways_bytes_per_us: 164_000,
        ..Self::H100
    };

    /// GH200 with 96 GB (data sheet "GH200 Grace Hopper Superchip"): an H100 with 4 TB/s of memory.
    pub const GH200: Self =
        Self { name: "GH200", gpu: "GH200", memory_bytes_per_us: 3_541_000, ..Self::H100 };

    /// H20. NVIDIA publishes no data sheet; vendors state 78 SMs, 148 TFLOP/s, 4 TB/s, and NVLink
    /// as an H100's.
    pub const H20: Self = of_sheet(
        "H20",
        "H20",
        Generation::Hopper,
        &DataSheet {
            multiprocessors: 78,
            ops_per_cycle: 1024,
            boost_mhz: 1853,
            memory_gb_per_s: 4000,
            wires: Wires::NvLink(450),
        },
    );

    /// A100 SXM of 80 GB (data sheet "A100 Tensor Core GPU": 312 TFLOP/s, 2039 GB/s, NVLink of 600
    /// GB/s in both directions).
    pub const A100_SXM: Self = of_sheet(
        "A100-SXM",
        "A100",
        Generation::Portable,
        &DataSheet {
            multiprocessors: 108,
            ops_per_cycle: 2048,
            boost_mhz: 1410,
            memory_gb_per_s: 2039,
            wires: Wires::NvLink(300),
        },
    );

    /// A800 SXM: an A100 with 400 GB/s of NVLink for 600.
    pub const A800: Self = Self {
        name: "A800",
        gpu: "A800",
        link_bytes_per_us: 164_000,
        both_ways_bytes_per_us: 164_000,
        ..Self::A100_SXM
    };

    /// A100 PCIe of 80 GB (the same data sheet: 1935 GB/s), peers reached over PCIe.
    pub const A100_PCIE: Self = of_sheet(
        "A100-PCIe",
        "A100 PCIe",
        Generation::Portable,
        &DataSheet {
            multiprocessors: 108,
            ops_per_cycle: 2048,
            boost_mhz: 1410,
            memory_gb_per_s: 1935,
            wires: PCIE_4,
        },
    );

    /// A10 (data sheet "A10 Tensor Core GPU": 125 TFLOP/s, 600 GB/s).
    pub const A10: Self = of_sheet(
        "A10",
        "A10",
        Generation::Portable,
        &DataSheet {
            multiprocessors: 72,
            ops_per_cycle: 1024,
            boost_mhz: 1695,
            memory_gb_per_s: 600,
            wires: PCIE_4,
        },
    );

    /// L4 (data sheet "L4 Tensor Core GPU": 121 TFLOP/s dense, 300 GB/s). Its 72 W may allow less
    /// than this clock.
    pub const L4: Self = of_sheet(
        "L4",
        "L4",
        Generation::Ada,
        &DataSheet {
            multiprocessors: 58,
            ops_per_cycle: 1024,
            boost_mhz: 2040,
            memory_gb_per_s: 300,
            wires: PCIE_4,
        },
    );

    /// L20 (vendors' data sheets: 119.5 TFLOP/s, half of Ada's rate at this clock; 864 GB/s).
    pub const L20: Self = of_sheet(
        "L20",
        "L20",
        Generation::Ada,
        &DataSheet {
            multiprocessors: 92,
            ops_per_cycle: 512,
            boost_mhz: 2520,
            memory_gb_per_s: 864,
            wires: PCIE_4,
        },
    );

    /// L40S (data sheet "L40S GPU": 362 TFLOP/s dense, 864 GB/s).
    pub const L40S: Self = of_sheet(
        "L40S",
        "L40S",
        Generation::Ada,
        &DataSheet {
            multiprocessors: 142,
            ops_per_cycle: 1024,
            boost_mhz: 2520,
            memory_gb_per_s: 864,
            wires: PCIE_4,
        },
    );

    /// RTX 4090 (whitepaper "NVIDIA Ada GPU Architecture": 165.2 TFLOP/s with fp32 accumulation,
    /// 1008 GB/s). Its driver gives no peer access.
    pub const RTX_4090: Self = Self {
        host_staged: true,
        ..of_sheet(
            "RTX-4090",
            "RTX 4090",
            Generation::Ada,
            &DataSheet {
                multiprocessors: 128,
                ops_per_cycle: 512,
                boost_mhz: 2520,
                memory_gb_per_s: 1008,
                wires: PCIE_4,
            },
        )
    };

    /// RTX 5090 (whitepaper "NVIDIA RTX Blackwell GPU Architecture": 209.5 TFLOP/s with fp32
    /// accumulation, 1792 GB/s). Its driver gives no peer access.
    pub const RTX_5090: Self = Self {
        host_staged: true,
        ..of_sheet(
            "RTX-5090",
            "RTX 5090",
            Generation::Ada,
            &DataSheet {
                multiprocessors: 170,
                ops_per_cycle: 512,
                boost_mhz: 2407,
                memory_gb_per_s: 1792,
                wires: PCIE_5,
            },
        )
    };

    /// B200 (data sheet "HGX B200": 8 TB/s, NVLink of 1800 GB/s in both directions). No source has
    /// the rate of mma.sync there: an SM is taken to have an A100's.
    pub const B200: Self = of_sheet(
        "B200",
        "B200",
        Generation::Ada,
        &DataSheet {
            multiprocessors: 148,
            ops_per_cycle: 2048,
            boost_mhz: 1965,
            memory_gb_per_s: 8000,
            wires: Wires::NvLink(900),
        },
    );

    /// All profiles.
    pub const ALL: [Self; 16] = [
        Self::H200,
        Self::H100,
        Self::H100_PAIR_BY_HOST,
        Self::H800,
        Self::H20,
        Self::GH200,
        Self::A100_SXM,
        Self::A100_PCIE,
        Self::A800,
        Self::A10,
        Self::L4,
        Self::L20,
        Self::L40S,
        Self::RTX_4090,
        Self::RTX_5090,
        Self::B200,
    ];

    /// Whether committed records confirm the profile.
    pub fn is_measured(&self) -> bool {
        [Self::H200, Self::H100, Self::H100_PAIR_BY_HOST].contains(self)
    }
}

/// Of 1830 MHz and 4800 GB/s of its data sheet an H200 reaches 1460 and 4250, and of 450 GB/s of
/// NVLink 370. Two H100 reach 54 of 64 GB/s of PCIe in one direction, and 34 in each of both. L2 is
/// taken to give as many bytes a cycle and SM as an H200's. Latencies are an H200's.
const fn of_sheet(
    name: &'static str,
    gpu: &'static str,
    generation: Generation,
    sheet: &DataSheet,
) -> Machine {
    let (h200, by_host) = (Machine::H200, Machine::H100_PAIR_BY_HOST);
    let clock_mhz = sheet.boost_mhz * h200.clock_mhz / 1830;
    let multiprocessors = sheet.multiprocessors;
    let (wires, link, both_ways, staged) = match sheet.wires {
        Wires::NvLink(rate) => {
            let rate = rate * h200.link_bytes_per_us / 450;
            ("NVLink", rate, rate, h200.staged_bytes_per_us)
        }
        Wires::Pcie(rate) => {
            let both_ways = rate * by_host.both_ways_bytes_per_us / 64;
            ("PCIe", rate * by_host.link_bytes_per_us / 64, both_ways, both_ways)
        }
    };
    Machine {
        name,
        gpu,
        wires,
        generation,
        multiprocessors,
        ops_per_cycle: sheet.ops_per_cycle,
        clock_mhz,
        memory_bytes_per_us: sheet.memory_gb_per_s * h200.memory_bytes_per_us / 4800,
        l2_bytes_per_us: h200.l2_bytes_per_us * multiprocessors as u64 * clock_mhz
            / (h200.multiprocessors as u64 * h200.clock_mhz),
        link_bytes_per_us: link,
        both_ways_bytes_per_us: both_ways,
        staged_bytes_per_us: staged,
        ..h200
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_the_profile_of_its_name() {
        for (driver, profile) in [
            ("NVIDIA H200", "H200"),
            ("NVIDIA H20", "H20"),
            ("NVIDIA GH200 480GB", "GH200"),
            ("NVIDIA A100-SXM4-80GB", "A100-SXM"),
            ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
            ("NVIDIA A100-PCIE-40GB", "A100-PCIe"),
            ("NVIDIA A10", "A10"),
            ("NVIDIA L4", "L4"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA GeForce RTX 4090", "RTX-4090"),
            ("NVIDIA A40", "H100"),
        ] {
            let found = Machine::of_gpu(driver, 7);
            // Those of one GPU are told apart by what connects them, which the name does not say.
            let named = Machine::ALL.into_iter().find(|machine| machine.name == profile).unwrap();
            assert_eq!((found.gpu, found.multiprocessors), (named.gpu, 7), "{driver}");
        }
        let names: std::collections::BTreeSet<_> =
            Machine::ALL.iter().map(|machine| machine.name.to_lowercase()).collect();
        assert_eq!(names.len(), Machine::ALL.len());
    }

    /// Rates of the data sheets in TFLOP/s, which the SMs' rates must give.
    #[test]
    fn operations_of_all_sms_are_those_of_the_data_sheets() {
        let sheets = [
            (Machine::A100_SXM, 312.0),
            (Machine::A10, 125.0),
            (Machine::L4, 121.0),
            (Machine::L20, 119.5),
            (Machine::L40S, 362.0),
            (Machine::RTX_4090, 165.2),
            (Machine::RTX_5090, 209.5),
            (Machine::H20, 148.0),
        ];
        for (machine, tflops) in sheets {
            let boost_mhz = machine.clock_mhz as f64 * 1830.0 / 1460.0;
            let ours = f64::from(machine.multiprocessors)
                * machine.ops_per_cycle as f64
                * boost_mhz
                * 1e-6;
            assert!((ours / tflops - 1.0).abs() < 0.02, "{}: {ours:.1} TFLOP/s", machine.name);
        }
    }
}
