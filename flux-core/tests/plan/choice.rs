//! Plans of tables and of the model, for random problems.

use flux_core::machine::Machine;
use flux_core::plan::{
    CommMode, Links, Mover, Plan, PlanKey, PlanOrigin, PlanRow, PlanTable, RowMapping, TableKind,
    Target, choose,
};
use flux_core::program::{Channels, TileProgram, check};
use flux_core::tile::Generation;
use flux_core::{DType, Nodes, OpKind, Partials, Problem, WorldSize};
use proptest::prelude::*;

fn problems() -> impl Strategy<Value = Problem> {
    let extents = (1_usize..2400, 1_usize..200, 1_usize..200, 0_usize..8);
    (prop::sample::select(&OpKind::ALL[..]), 1_u32..=8, extents).prop_map(
        |(op, world, (rows, n, k, more))| {
            let ranks = world as usize;
            let split = |groups| 8 * (groups * ranks + more % ranks);
            Problem::new(op, rows, split(n), split(k), DType::Bf16, WorldSize::new(world).unwrap())
                .unwrap()
        },
    )
}

fn targets(problem: &Problem) -> [Target; 3] {
    let peers = Target::peer_memory(Machine::H100, problem);
    let channels =
        Channels { all: 16, each: 4, part_bytes: 4 << 20, least_bytes: 4 << 20, network: false };
    [
        peers,
        Target { links: Links::HostStaged, ..peers },
        Target { links: Links::Messages(channels), ..peers },
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Every candidate is canonical and has right programs on all ranks.
    #[test]
    fn candidates_are_canonical_and_have_right_programs(
        problem in problems(),
        number in any::<prop::sample::Index>(),
    ) {
        for target in targets(&problem) {
            let all = Plan::candidates(&problem, &target);
            prop_assert!(!all.is_empty());
            let plan = all[number.index(all.len())];
            prop_assert_eq!(plan.canonical(&problem, &target), plan);
            prop_assert!(plan.cost_ns(&problem, &target).is_finite());
            let build = |rank| {
                TileProgram::build(&problem, rank, &plan.schedule(&problem, &target)).unwrap()
            };
            let programs: Vec<_> = problem.world().ranks().map(build).collect();
            prop_assert_eq!(check::verify(&programs), Ok(()), "{}: {}", problem, plan);
        }
    }

    /// A plan and its canonical form have the same programs.
    #[test]
    fn canonical_plans_have_the_same_programs(
        problem in problems(),
        number in any::<prop::sample::Index>(),
        extra in 0_u32..5,
    ) {
        let target = Target::peer_memory(Machine::H100, &problem);
        let all = Plan::candidates(&problem, &target);
        let plan = all[number.index(all.len())];
        let asked = Plan {
            k_slices: if problem.op().reduces() { plan.k_slices + extra } else { plan.k_slices },
            ..plan
        };
        for rank in problem.world().ranks() {
            let build = |plan: &Plan| {
                TileProgram::build(&problem, rank, &plan.schedule(&problem, &target)).unwrap()
            };
            prop_assert_eq!(build(&asked), build(&asked.canonical(&problem, &target)));
        }
    }
}

/// Of many rows partial tiles and results are carried beside the multiplication; few are stored by
/// kernels, in one exchange.
#[test]
fn an_all_reduce_through_the_host_is_per_shard_from_some_rows_on() {
    for (world, few, many) in [(2, 64, 512), (4, 16, 256)] {
        let world = WorldSize::new(world).unwrap();
        let chosen = |m| {
            let problem =
                Problem::new(OpKind::GemmAllReduce, m, 8192, 28672, DType::Bf16, world).unwrap();
            let machine = Machine::H200.staged(world.get());
            let target =
                Target { links: Links::HostStaged, ..Target::peer_memory(machine, &problem) };
            Plan::ranked(&problem, &target)[0]
        };
        let (kernel, copies) = (Mover::Kernel, Mover::CopyEngine);
        let plan = chosen(few);
        assert_eq!(
            (plan.rows, plan.comm),
            (RowMapping::Flattened, CommMode::Fused { mover: kernel })
        );
        for m in [many, 2048, 8192] {
            let plan = chosen(m);
            let per_shard = matches!(plan.rows, RowMapping::PerShard { .. });
            assert!(per_shard && plan.comm == CommMode::Fused { mover: copies }, "{m}: {plan}");
        }
    }
}

/// Nothing of a GEMM-AllReduce can be passed on between nodes.
#[test]
fn across_nodes_an_all_reduce_is_a_librarys_and_the_other_ops_are_messages() {
    let world = WorldSize::new(8).unwrap();
    for op in OpKind::ALL {
        let problem = Problem::new(op, 8 * 128, 8192, 28672, DType::Bf16, world).unwrap();
        let [.., messages] = targets(&problem);
        let target = Target { nodes: Nodes::new(world, 2).unwrap(), ..messages };
        let is_sequential = |plan: &Plan| plan.comm == CommMode::Sequential;
        let all = Plan::candidates(&problem, &target);
        let wanted = op == OpKind::GemmAllReduce;
        assert!(!all.is_empty() && all.iter().all(|plan| is_sequential(plan) == wanted), "{op}");
        for text in ["comm=sequential", "comm=overlapped:3", "rows=per-shard:2", "rows=flattened:2"]
        {
            let plan: Plan = format!("tile=128x128x64 {text}").parse().unwrap();
            assert_eq!(is_sequential(&plan.canonical(&problem, &target)), wanted, "{op}: {text}");
        }
        if wanted {
            let invariant = Target { batch_invariant: true, ..target };
            assert_eq!(Plan::candidates(&problem, &invariant), []);
            assert_eq!(Plan::candidates(&problem.with_partials(Partials::F32), &target), []);
        }
    }
}

fn llama(m: usize) -> Problem {
    Problem::new(OpKind::GemmReduceScatter, m, 8192, 28672, DType::F16, WorldSize::new(4).unwrap())
        .unwrap()
}

#[test]
fn a_row_comes_first_then_a_neighbour_that_is_as_good_then_the_model() {
    let key =
        |problem: &Problem| PlanKey::new(problem, "GPU, new", Generation::Hopper, "1.2", "nvlink");
    let choice = |table: &PlanTable, m: usize| {
        let problem = llama(m);
        choose(
            &problem,
            &Target::peer_memory(Machine::H100, &problem),
            &key(&problem),
            &[(TableKind::User, table)],
        )
        .unwrap()
    };
    let empty = PlanTable::default();
    let (model, origin) = choice(&empty, 2048);
    assert_eq!(origin, PlanOrigin::Model);
    let slow: Plan =
        "tile=128x128x64 rows=flattened k=whole chunk=1 comm=fused:kernel".parse().unwrap();
    let mut table = PlanTable::default();
    table.set(PlanRow { key: key(&llama(1024)), m: 1024, plan: slow, us: 100.0 });
    assert_eq!(choice(&table, 1024), (slow, PlanOrigin::Table(TableKind::User)));
    assert_eq!(
        choice(&table, 2048),
        (model, PlanOrigin::Model),
        "the neighbour's is far slower by the model"
    );
    table.set(PlanRow { key: key(&llama(1536)), m: 1536, plan: model, us: 100.0 });
    assert_eq!(choice(&table, 2048).1, PlanOrigin::Neighbour { table: TableKind::User, m: 1536 });
    assert_eq!(choice(&table, 4096).1, PlanOrigin::Model, "no row is near enough");
    let other = PlanKey { driver: "1.3".to_owned(), ..key(&llama(1024)) };
    let target = Target::peer_memory(Machine::H100, &llama(1024));
    let choice = |key: &PlanKey, table: &PlanTable| {
        choose(&llama(1024), &target, key, &[(TableKind::User, table)]).unwrap().1
    };
    assert_eq!(choice(&other, &table), PlanOrigin::Model);
    let portable = PlanKey { generation: Generation::Portable, ..key(&llama(1024)) };
    assert_eq!(
        choice(&portable, &table),
        PlanOrigin::Model,
        "measured with the other kernel, which has this tile too"
    );
    let mut foreign = PlanTable::default();
    let no_kernel: Plan = "tile=96x96x64".parse().unwrap();
    foreign.set(PlanRow { key: key(&llama(1024)), m: 1024, plan: no_kernel, us: 1.0 });
    assert_eq!(
        choice(&key(&llama(1024)), &foreign),
        PlanOrigin::Model,
        "no kernel executes the row's plan"
    );
    let tables = [(TableKind::User, &foreign), (TableKind::Shipped, &table)];
    assert_eq!(
        choose(&llama(1024), &target, &key(&llama(1024)), &tables),
        Some((slow, PlanOrigin::Table(TableKind::Shipped))),
        "such a row hides none of the next table"
    );
}

#[test]
fn tables_are_read_as_they_are_written_and_damage_is_named() {
    let shipped = PlanTable::shipped();
    assert!(shipped.rows().len() > 1000);
    assert_eq!(PlanTable::parse(&shipped.to_string()).unwrap().rows().len(), shipped.rows().len());
    let error = |text: &str| PlanTable::parse(text).unwrap_err().to_string();
    assert!(error("").starts_with("the first lines are not"));
    let text = shipped.to_string();
    let damaged = text.replacen("bf16", "bf17", 1);
    assert_eq!(error(&damaged), "line 3: dtype is \"bf17\"");
    let rows = text.trim_end();
    let cut = &rows[..rows.rfind(',').unwrap()];
    assert_eq!(error(cut), format!("line {}: us is \"\"", rows.lines().count()));
}

fn keys() -> impl Strategy<Value = PlanKey> {
    let driver = prop::sample::select(vec!["any", "13000", "host"]);
    let generation = prop::sample::select(Generation::ALL.to_vec());
    let key = |(problem, device, generation, driver, (batch_invariant, partials)): (
        Problem,
        String,
        _,
        &str,
        _,
    )| PlanKey {
        batch_invariant,
        ..PlanKey::new(&problem.with_partials(partials), &device, generation, driver, "nvlink")
    };
    let partials = prop::sample::select(vec![Partials::Output, Partials::F32]);
    (problems(), "[ -~]{0,12}", generation, driver, (any::<bool>(), partials)).prop_map(key)
}

fn rows() -> impl Strategy<Value = PlanRow> {
    let plans = prop::sample::select(vec![
        "tile=128x256x64",
        "tile=64x128x64 rows=flattened k=split-k:2",
        "tile=256x128x64 comm=overlapped:3",
    ]);
    let hundredths = 0_u32..10_000_000;
    let row = |(key, m, plan, us): (_, _, &str, _)| PlanRow {
        key,
        m,
        plan: plan.parse().unwrap(),
        us: f64::from(us) / 100.0,
    };
    (keys(), 1_u32..1 << 20, plans, hundredths).prop_map(row)
}

proptest! {
    /// What is printed is read back, whole and row by row.
    #[test]
    fn tables_are_read_as_they_are_printed(rows in prop::collection::vec(rows(), 0..20)) {
        let (mut table, mut text) = (PlanTable::default(), String::new());
        for row in rows {
            text = PlanTable::with_row(&text, &row).unwrap();
            table.set(row);
        }
        prop_assert_eq!(&PlanTable::parse(&table.to_string()).unwrap(), &table);
        if !text.is_empty() {
            let read = PlanTable::parse(&text).unwrap();
            prop_assert_eq!(read.rows().len(), table.rows().len());
            prop_assert!(table.rows().iter().all(|row| read.rows().contains(row)));
        }
    }

    #[test]
    fn no_text_panics(
        text in "(# flux plan table \
                 1\ndevice,kernel,driver,transport,world,op,dtype,n,k,m,plan,us\n)?[ -~\n]{0,80}",
    ) {
        let _ = PlanTable::parse(&text);
    }
}

#[test]
fn a_row_more_leaves_comments_and_other_rows_as_they_are() {
    let row = |m: u32, us: f64| PlanRow {
        key: PlanKey::new(&llama(1024), "GPU", Generation::Hopper, "1.2", "nvlink"),
        m,
        plan: "tile=128x256x64".parse().unwrap(),
        us,
    };
    let text = PlanTable::with_row("", &row(64, 1.0)).unwrap()
        + "# mine\n\n"
        + &row(128, 2.0).to_string()
        + "\n";
    let more = PlanTable::with_row(&text, &row(64, 3.0)).unwrap();
    let expected =
        text.replace(&format!("{}\n", row(64, 1.0)), "") + &row(64, 3.0).to_string() + "\n";
    assert_eq!(more, expected);
    assert_eq!(
        PlanTable::with_row("# other\n", &row(64, 1.0)).unwrap_err().to_string(),
        PlanTable::parse("").unwrap_err().to_string()
    );
}

#[test]
fn a_table_of_measured_machines_serves_the_layers_that_were_measured() {
    let problem = llama(1024);
    let key =
        PlanKey::new(&problem, "NVIDIA H100 80GB HBM3", Generation::Hopper, "580.1", "nvlink");
    let target = Target::peer_memory(Machine::H100, &problem);
    let (_, origin) =
        choose(&problem, &target, &key, &[(TableKind::Shipped, &PlanTable::shipped())]).unwrap();
    assert_eq!(origin, PlanOrigin::Table(TableKind::Shipped), "fp16 has the plan of bf16");
}
