use super::contenders::{Contender, Measured};
use super::*;
use crate::bench::gpu_contenders::SETS;
use crate::bench::in_round;
use crate::harness::scaled::{self, bytes_behind_rows};
use crate::harness::{
    FIRST, Fill, MadeBy, Operands, Times, Verdict, data, elements, reference, w_window, x_window,
};
use flux_core::layout::{FAULT_BYTES, LINE, RowLayout, control, pad_bytes};
use flux_core::problem::WeightList;
use flux_core::program::{Chunk, Schedule, Sink, TileProgram};
use flux_core::signal::Epoch;
use flux_core::tile::Generation;
use flux_core::{DType, Nodes, Numerics, OpKind, Problem, Rank, Scales, TileShape};
use flux_kernels::cpu::{
    Buffers, CpuArgs, CpuWeight, Epilogue, Executor, HostMemory, Rows, RowsMut,
};
use flux_kernels::{Element, F8E4M3, KernelTarget, Operand, Shapes, Variant, WeightLayout};
use half::bf16;
use std::num::NonZeroUsize;
use std::time::Duration;

const OPS: [OpKind; 2] = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter];

fn args(words: &str) -> Args {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }
    <Line as clap::Parser>::parse_from(std::iter::once("core").chain(words.split_whitespace())).args
}

fn planned(args: &Args) -> anyhow::Result<Vec<PlannedLayer>> {
    cases(args, Machine::H200)
}

#[test]
fn what_is_left_out_is_what_the_kernel_is_judged_by() {
    let cases = planned(&args("")).unwrap();
    let shape = |case: &PlannedLayer| {
        (case.alone.op().name(), case.name.clone(), case.alone.m(), case.alone.n(), case.alone.k())
    };
    let gpt3: Vec<_> =
        cases.iter().filter(|c| c.name == "gpt3" && c.alone.m() == 8192).map(shape).collect();
    assert_eq!(cases.len(), 16);
    assert_eq!(
        gpt3,
        [
            ("ag_gemm", "gpt3".into(), 8192, 6144, 12288),
            ("gemm_rs", "gpt3".into(), 8192, 12288, 6144)
        ]
    );
    assert!(cases.iter().all(|case| case.problem.flop_per_rank() == case.alone.flop_per_rank()));
    for (words, why) in
        [("--tp 1", "at least 2"), ("--tp 17", "outside 1 to 16"), ("--ms 1001", "pad m to 1008")]
    {
        let error = format!("{:#}", layers(&args(words)).unwrap_err());
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn the_gemm_alone_has_the_worlds_tiles_and_no_signal_but_of_shared_ones() {
    for words in ["--tp 2", "--tp 4", "--tp 8", "--tp 2 --dtype fp8 --scales block"] {
        for case in planned(&args(words)).unwrap() {
            let (core, first, order) =
                (case.core().unwrap(), case.program(FIRST).unwrap(), case.order().unwrap());
            let name = format!("{}, {}", case.problem, case.plan);
            assert!(
                core.transfers.is_empty()
                    && core.signals == core.split_k_slots
                    && core.awaits.len() as u32 == core.split_k_slots,
                "{name}"
            );
            assert!(
                core.items.iter().all(|item| matches!(item.sink, Sink::Store | Sink::Partial)),
                "{name}"
            );
            // The reference shapes' shards are whole tiles: the same items in another order.
            let area = |p: &TileProgram| {
                p.items
                    .iter()
                    .map(|i| u64::from(i.rows) * u64::from(i.cols) * u64::from(i.k_steps))
                    .sum::<u64>()
            };
            assert_eq!(
                (core.tile, core.items.len(), area(&core)),
                (first.tile, first.items.len(), area(&first)),
                "{name}"
            );
            assert!(
                first.items.iter().any(|item| item.await_count + item.late_count > 0),
                "{name}"
            );
            assert!(
                order
                    .items
                    .iter()
                    .all(|item| item.await_count == 0 && item.late_count == item.parts),
                "{name}"
            );
        }
    }
}

#[test]
fn every_contender_takes_every_set_and_follows_every_other() {
    for (library, sm80) in [(false, false), (true, false), (true, true)] {
        let contenders = Contender::of(library, sm80);
        let count = contenders.len();
        let rounds = 2 * count * SETS;
        let number = |of| contenders.iter().position(|&contender| contender == of).unwrap();
        let calls: Vec<_> =
            (0..rounds).flat_map(|round| in_round(&contenders, round)).map(number).collect();
        let (mut taken, mut follows) = (vec![[0; SETS]; count], vec![vec![0; count]; count]);
        for (call, &contender) in calls.iter().enumerate() {
            taken[contender][call % SETS] += 1;
        }
        for round in calls.chunks(count) {
            for pair in round.windows(2) {
                follows[pair[1]][pair[0]] += 1;
            }
        }
        assert_eq!(taken, vec![[rounds / SETS; SETS]; count]);
        for (contender, follows) in follows.iter().enumerate() {
            let expected: Vec<_> = (0..count)
                .map(|other| if other == contender { 0 } else { rounds / count })
                .collect();
            assert_eq!(*follows, expected, "{contender} of {count}");
        }
    }
}

/// Zeroed host memory on a line's border, whose address may be told.
struct Block {
    lines: Vec<Line>,
}

#[expect(dead_code, reason = "read and written by its address")]
#[repr(align(128))]
#[derive(Clone, Copy)]
struct Line([u32; LINE as usize / 4]);

impl Block {
    fn new(bytes: u64) -> Self {
        Self { lines: vec![Line([0; LINE as usize / 4]); bytes.div_ceil(LINE).max(1) as usize] }
    }

    fn address(&mut self) -> u64 {
        self.lines.as_mut_ptr().expose_provenance() as u64
    }
}

/// Words at an address that [`Block::address`] told.
fn set_words(address: u64, count: u64, value: u32) {
    let first: *mut u32 = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: inside of a block of this test, which one thread uses.
    (0..count as usize).for_each(|i| unsafe { first.add(i).write(value) });
}

/// A harness, on the host.
struct HostReplay {
    executor: Executor,
    data: Vec<u64>,
    pads: Block,
    control: Block,
    fault: Block,
}

impl HostReplay {
    fn new(program: TileProgram, data: Vec<u64>) -> Self {
        let size = program.workspace();
        let pads = Block::new(pad_bytes(size.signals) * u64::from(program.problem.world().get()));
        let (control, fault) = (Block::new(control::bytes(size.counters)), Block::new(FAULT_BYTES));
        Self {
            executor: Executor::new(program, NonZeroUsize::MIN).unwrap(),
            data,
            pads,
            control,
            fault,
        }
    }

    /// One call of `epoch` with the peers' signals raised; any other wait fails at once.
    fn call<X: Element>(&mut self, epoch: Epoch, part: &RankOperands<X>) -> Vec<bf16> {
        let program = self.executor.program();
        let (problem, rank) = (program.problem, program.rank);
        let pads = mock_peers::pads(program, self.pads.address());
        set_words(
            pads[0],
            pads.len() as u64 * pad_bytes(program.workspace().signals) / 4,
            epoch.before(1).get(),
        );
        for words in mock_peers::raised_before(program) {
            set_words(pads[rank.index()] + words.offset, words.count, epoch.get());
        }
        let (control, fault) = (self.control.address(), self.fault.address());
        set_words(control + control::EPOCH, 1, epoch.get());
        // SAFETY: all blocks outlive the call and belong to it; `elsewhere` holds a region at each
        // address.
        let memory = unsafe {
            HostMemory::new(&self.data, &pads, control, fault, program.workspace(), Duration::ZERO)
        };
        let ys = problem.y_shape(rank);
        let mut y = vec![bf16::NAN; ys.rows as usize * ys.cols as usize];
        let k = problem.k_local(rank);
        let shapes = Shapes::new(&problem, rank);
        let scales = |operand, list| {
            let stride = shapes.of_operand(operand, 0).cols as usize;
            (problem.numerics().scales != Scales::None).then_some(Rows { elements: list, stride })
        };
        let of_x = scales(Operand::ScaleX, &part.scales[0][..]);
        let of_w = scales(Operand::ScaleW, &part.scales[1][..]);
        let called = self.executor.run(
            &mut Buffers::default(),
            CpuArgs {
                gathered: None,
                x: Rows { elements: &part.x, stride: k as usize + bytes_behind_rows(&problem) },
                scale: of_x,
                weights: WeightList::one(CpuWeight {
                    w: Rows { elements: &part.w, stride: k as usize },
                    scale: of_w,
                    y: RowsMut { elements: &mut y, stride: ys.cols as usize },
                }),
                layout: WeightLayout::Nk,
                epilogue: Epilogue::default(),
                memory,
                await_pushed: false,
                op_hash: 0,
                stamps: None,
            },
        );
        assert!(called.is_ok(), "{problem} rank {rank} call {epoch}: {called:?}");
        y
    }
}

/// A rank's operands, rows of an AllGather-GEMM's `x` with their scales.
struct RankOperands<X> {
    x: Vec<X>,
    w: Vec<X>,
    /// Of `x` and `w`.
    scales: [Vec<f32>; 2],
}

impl<X: Element> RankOperands<X> {
    fn new(operands: &Operands, [x, w]: [data::Window; 2], source: Rank) -> Self {
        let behind = bytes_behind_rows(&operands.problem);
        let [of_x, of_w] = operands.parts([x, w], source);
        Self {
            x: rows(operands, &of_x, x, operands.seed_x, behind),
            w: rows(operands, &of_w, w, operands.seed_w, 0),
            scales: [of_x, of_w].map(|part| part.scales(part.layout())),
        }
    }
}

/// Rows of an operand as they lie in memory.
fn rows<X: Element>(
    operands: &Operands,
    part: &scaled::Part,
    window: data::Window,
    seed: u64,
    behind: usize,
) -> Vec<X> {
    let mut to = vec![X::from_f32(0.0); elements(window) + window.rows as usize * behind];
    if operands.problem.numerics().scales == Scales::None {
        data::fill(&mut to, window, seed, operands.fill);
    } else {
        part.write_codes(&mut to, behind);
    }
    to
}

/// Runs rank 0 alone after its peers' parts, with the host's executor.
fn alone_as_first<X: Element>(case: &PlannedLayer, order: bool, fill: Fill) -> Verdict {
    let problem = &case.problem;
    let first = if order { case.order() } else { case.program(FIRST) }.unwrap();
    let (size, flattened) = (first.workspace(), first.rows.is_flattened());
    let (mut own, mut elsewhere) =
        (Block::new(size.data_bytes()), Block::new(2 * size.data_bytes()));
    let (own, elsewhere) = (own.address(), elsewhere.address());
    let gathered = (problem.op() == OpKind::AllGatherGemm).then(|| mock_peers::gathered(&first));
    let mut harness =
        HostReplay::new(first.clone(), mock_peers::data_of_first(&first, own, elsewhere));
    let mut verdict = Verdict::default();
    for epoch in [Epoch::FIRST, Epoch::FIRST.next()] {
        let operands = Operands::new(*problem, 1, u64::from(epoch.get()), fill);
        if let Some(window) = gathered {
            let of_x = scaled::Part::of_x(problem, operands.generator_of_x(), window, FIRST);
            let behind = bytes_behind_rows(problem);
            let rows = rows::<X>(&operands, &of_x, window, operands.seed_x, behind);
            let to: *mut X = std::ptr::with_exposed_provenance_mut(
                own as usize + epoch.half() * size.half_stride() as usize,
            );
            // SAFETY: the rows are a half's gather buffer.
            unsafe { to.copy_from_nonoverlapping(rows.as_ptr(), rows.len()) };
        } else {
            for rank in problem.world().ranks().skip(1) {
                let data = mock_peers::data_of_peer(problem.world(), own, elsewhere);
                let windows = [x_window(problem, rank), w_window(problem, rank)];
                let mut peer = HostReplay::new(case.program(rank).unwrap(), data);
                peer.call(epoch, &RankOperands::<X>::new(&operands, windows, rank));
            }
        }
        // Of the GEMM prologue: of an AllGather-GEMM's x only the first rows are rank 0's.
        let windows = [x_window(&case.alone, FIRST), w_window(&case.alone, FIRST)];
        let y = harness.call(epoch, &RankOperands::<X>::new(&operands, windows, FIRST));
        let made_by = MadeBy { flattened, unfused: false, nodes: Nodes::apart(problem.world()) };
        verdict = verdict.merge(reference::verify::<X, bf16>(&operands, FIRST, &y, made_by));
    }
    verdict
}

#[test]
fn rank_0_is_right_without_peers_where_they_have_done_their_part() {
    let plans = [
        "tile=8x16x8",
        "tile=8x16x8 chunk=1 rows=per-shard:2 k-slices=3",
        "tile=8x16x8 chunk=2 k=split-k:2",
        "tile=8x16x8 rows=flattened k=split-k:2 k-slices=2",
        "tile=8x16x8 rows=flattened",
        "tile=8x16x8 rows=flattened chunk=1 k=split-k:2",
    ];
    for (op, tp) in OPS.into_iter().flat_map(|op| [2, 3, 4].map(|tp| (op, tp))) {
        let (n, k) = if op == OpKind::AllGatherGemm { (24 * tp, 40) } else { (24, 40 * tp) };
        for plan in plans {
            let problem =
                Problem::new(op, 12 * tp, n, k, DType::Bf16, shapes::world(tp as u32).unwrap())
                    .unwrap();
            let asked = PlanArgs { plan: Some(plan.parse().unwrap()), candidate: None };
            let case =
                PlannedLayer::new(Layer { name: "gpt3".to_owned(), problem }, asked, Machine::H200)
                    .unwrap();
            for (order, fill) in
                [(false, Fill::SmallInts), (false, Fill::Uniform), (true, Fill::SmallInts)]
            {
                let verdict = alone_as_first::<bf16>(&case, order, fill);
                assert!(
                    verdict.ok(),
                    "{problem}, {plan}, without waits: {order}, {fill:?}: {verdict}"
                );
            }
        }
    }
}

#[test]
fn rank_0_is_right_with_operands_of_8_bits() {
    for (op, scales) in
        OPS.into_iter().flat_map(|op| Scales::OF_QUANTIZED.map(|scales| (op, scales)))
    {
        let [tp, group] = [2, if scales == Scales::Block { 128 } else { 32 }];
        let (n, k) = match op {
            OpKind::AllGatherGemm => (group * tp, 2 * group),
            _ => (group, 2 * group * tp),
        };
        let numerics = Numerics::e4m3(scales, DType::Bf16);
        let problem =
            Problem::new(op, 12 * tp, n, k, numerics, shapes::world(tp as u32).unwrap()).unwrap();
        for plan in ["tile=8x16x128", "tile=8x16x128 rows=flattened chunk=1"] {
            let asked = PlanArgs { plan: Some(plan.parse().unwrap()), candidate: None };
            let layer = Layer { name: "gpt3".to_owned(), problem };
            let case = PlannedLayer::new(layer, asked, Machine::H200).unwrap();
            for fill in [Fill::SmallInts, Fill::Uniform] {
                let verdict = alone_as_first::<F8E4M3>(&case, false, fill);
                assert!(verdict.ok(), "{problem}, {plan}, {fill:?}: {verdict}");
            }
        }
    }
}

/// The sum of all products with scales as the library reads them.
#[test]
fn the_librarys_scales_are_those_of_the_kernel() {
    for scales in Scales::OF_QUANTIZED {
        let numerics = Numerics::e4m3(scales, DType::Bf16);
        let problem =
            Problem::new(OPS[1], 20, 256, 768, numerics, shapes::world(1).unwrap()).unwrap();
        let operands = Operands::new(problem, 1, 1, Fill::Uniform);
        let parts = operands.own_parts(FIRST);
        let [x_list, w_list] = parts.map(|part| part.scales(part.layout()));
        let [x_library, w_library] = parts.map(|part| part.scales(part.layout_of_cublas()));
        if scales != Scales::Block {
            assert_eq!((x_library, w_library), (x_list, w_list), "{scales}");
            continue;
        }
        // Six blocks along k: of w eight, of which the last two are none.
        assert_eq!((x_library.len(), w_library.len()), (20 * 6, 2 * 8));
        for block in 0..6 {
            for row in 0..20 {
                assert_eq!(
                    x_library[block * 20 + row].to_bits(),
                    x_list[row * 6 + block].to_bits()
                );
            }
            for rows in 0..2 {
                assert_eq!(
                    w_library[rows * 8 + block].to_bits(),
                    w_list[rows * 6 + block].to_bits()
                );
            }
        }
    }
}

#[test]
fn the_error_of_a_sample_is_that_of_roundings_until_a_part_is_off() {
    let numerics = Numerics::e4m3(Scales::Row, DType::Bf16);
    let problem = Problem::new(OPS[0], 300, 160, 256, numerics, shapes::world(1).unwrap()).unwrap();
    let operands = Operands::new(problem, 1, 1, Fill::Uniform);
    let [x, w] = operands.own_parts(FIRST).map(|part| part.dequantised::<F8E4M3>());
    let dot = |(x, w): (&[f32], &[f32])| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>();
    let rows = x.chunks_exact(256).flat_map(|x| w.chunks_exact(256).map(move |w| (x, w)));
    let right: Vec<_> = rows.map(|pair| bf16::from_f32(dot(pair))).collect();
    let error = |y: &[bf16]| reference::rms_error::<F8E4M3, bf16>(&operands, FIRST, y);
    // The rounding to bf16, and nothing else: uniform between 2^-9 and 2^-8 at most.
    assert!(error(&right) < 2_f64.powi(-9), "{}", error(&right));
    // A tile of any kernel.
    let mut wrong = right;
    for row in 128..192 {
        wrong[row * 160 + 64..][..64].fill(bf16::from_f32(1000.0));
    }
    assert!(error(&wrong) > 1.0, "{}", error(&wrong));
}

#[test]
fn what_the_own_items_raise_is_left_to_them() {
    let problem =
        Problem::new(OPS[1], 48, 24, 160, DType::Bf16, shapes::world(4).unwrap()).unwrap();
    let schedule = Schedule {
        chunk: Chunk::Tiles(1),
        rows: RowLayout::Flattened,
        split_k: 2,
        ..Schedule::of(TileShape::new(16, 24, 8))
    };
    let program = TileProgram::build(&problem, Rank::new(1), &schedule).unwrap();
    // Three tiles of four sources, and three partials of the own.
    assert_eq!(program.signals, 15);
    // A signal has a line for each half.
    let lines = |first: u64, signals: u64| mock_peers::Words {
        offset: (16 + 2 * first) * LINE,
        count: 2 * signals * LINE / 4,
    };
    // Rank 1 owns rows 12 to 24: of the tiles 0 and 1.
    assert_eq!(mock_peers::raised_before(&program), [lines(0, 2), lines(6, 2), lines(9, 2)]);
    // One of each source, where it announces all tiles.
    let program =
        TileProgram::build(&problem, Rank::new(1), &Schedule { chunk: Chunk::Shard, ..schedule })
            .unwrap();
    assert_eq!(
        (program.signals, mock_peers::raised_before(&program)),
        (7, vec![lines(0, 1), lines(2, 2)])
    );
}

fn flat(ms: f64) -> Times {
    Times { p10: ms, median: ms, p90: ms }
}

fn report() -> CoreReport {
    let case = planned(&args("--ms 8192 --shapes gpt3 --ops ag_gemm")).unwrap().remove(0);
    let verdict = Verdict { max_error: 1.5, max_reference: 1000.0, ..Verdict::default() };
    let [gemm, ours @ ..] = [1.592_5, 1.625, 1.64, 1.644_1].map(flat);
    let measured = Measured { gemm: Some(gemm), ours, sm80: None };
    let row = CoreRow::new(&case, "128x256x64".into(), measured, verdict, 30);
    CoreReport {
        schema: SCHEMA,
        origin: Origin::of_a_test("a device", 1, "flux-bench core"),
        rows: vec![row],
    }
}

#[test]
fn all_programs_of_a_case_are_of_the_type_that_was_asked_for() {
    for (words, dtype) in [("--ms 1024", DType::Bf16), ("--ms 1024 --dtype fp16", DType::F16)] {
        for case in planned(&args(words)).unwrap() {
            assert_eq!(
                (case.problem.numerics(), case.alone.numerics()),
                (dtype.into(), dtype.into()),
                "{words}"
            );
            for program in
                [case.core().unwrap(), case.order().unwrap(), case.program(Rank::new(1)).unwrap()]
            {
                assert_eq!(
                    Variant::of(&program, KernelTarget::of_generation(Generation::Hopper))
                        .unwrap()
                        .numerics(),
                    dtype.into(),
                    "{words}"
                );
            }
        }
    }
}

#[test]
fn a_row_derives_its_figures_from_the_medians_and_reads_back() {
    let report = report();
    let row = &report.rows[0];
    assert!(
        (row.core.unwrap() - 0.98).abs() < 1e-9
            && (row.flags - 0.011_754).abs() < 1e-6
            && (row.waits - 0.0025).abs() < 1e-9,
        "{row:?}"
    );
    assert!((row.tflops - 761.2).abs() < 0.01, "{row:?}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("core.json");
    crate::atomic_file::write_json(&path, &report).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(serde_json::from_str::<CoreReport>(&text).unwrap(), report);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&json["command"], &json["rows"][0]["t_flags_ms"]["median"]),
        (&"flux-bench core".into(), &1.6441.into())
    );
}

#[test]
fn the_table_shows_what_is_judged_and_a_row_that_failed() {
    let mut report = report();
    let text = table(&report);
    assert!(
        text.starts_with("a device, one GPU as rank 0 of 8, bf16\nmedians of 30 rounds"),
        "{text}"
    );
    let words: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
    let figures =
        ["1.593", "1.625", "98.0", "1.640", "1.644", "+1.18", "+0.25", "761", "yes,", "1.5e-3"];
    assert_eq!(
        words,
        [["ag_gemm", "gpt3", "8192", "49152", "12288"].as_slice(), &figures].concat()
    );
    report.rows[0].head.dtype = "fp16".to_owned();
    assert!(
        table(&report).starts_with("a device, one GPU as rank 0 of 8, fp16\n"),
        "{}",
        table(&report)
    );
    let kernels = vec!["ampere_gemm".to_owned(), "splitKreduce".to_owned()];
    report.rows[0].sm80 = Some(report.rows[0].sm80(flat(2.1), kernels));
    let text = table(&report);
    let words: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(
        words[words.len() - 5..],
        ["2.100", "129.2", "ampere_gemm", "+", "splitKreduce"],
        "{text}"
    );
    assert!(text.contains("T_sm80: best cuBLASLt algorithm"), "{text}");
    report.rows[0].sm80 = None;
    report.rows[0].rms_err = Some(1.1e-3);
    report.rows[0].t_gemm_ms = None;
    report.rows[0].core = None;
    report.rows[0].no_gemm = Some("cuBLASLt has none".to_owned());
    let text = table(&report);
    let words: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(words[5..8], ["-", "1.625", "-"], "{text}");
    assert_eq!(words[words.len() - 2..], ["1.10e-3", "-"], "{text}");
    assert!(text.contains("\ncuBLASLt has none\n"), "{text}");
    report.rows[0].rms_err = None;
    report.rows[0].verified = false;
    assert!(
        !report.verified() && table(&report).lines().last().unwrap().ends_with("  NO"),
        "{}",
        table(&report)
    );
}
