use super::*;
use flux_core::{DType, OpKind, WorldSize};

impl Origin {
    /// A run for tests.
    pub(crate) fn of_a_test(device: &str, gpus: u32, command: &str) -> Self {
        Self {
            device: device.to_owned(),
            gpus,
            driver: Some("580.1".to_owned()),
            commit: "0123".to_owned(),
            date: "2026-11-21T08:37:56Z".to_owned(),
            command: command.to_owned(),
            ..Self::default()
        }
    }
}

fn flat(ms: f64) -> Times {
    Times { p10: ms, median: ms, p90: ms }
}

fn report() -> Report {
    let problem = Problem::new(
        OpKind::AllGatherGemm,
        8192,
        49152,
        12288,
        DType::Bf16,
        WorldSize::new(8).unwrap(),
    )
    .unwrap();
    let measured = Measured {
        times: Each { op: flat(1.73), gemm: flat(1.6), comm: flat(0.57), serial: flat(2.12) },
        late: Late::default(),
        enqueue: None,
    };
    let verified = Verdict { max_error: 1.5e-3, max_reference: 1.0, ..Verdict::default() };
    Report {
        schema: SCHEMA,
        origin: Origin::of_a_test("a device", 8, "flux-bench bench"),
        transport: "nvlink".into(),
        placement: Placement::THREADS,
        nccl: None,
        rows: vec![Row::new("gpt3", &problem, "128x256x64".into(), measured, verified, 30)],
    }
}

/// All that is printed of a report.
fn table(report: &Report) -> String {
    let first = &report.rows[0];
    let on = (&*report.transport, report.placement);
    let setup = setup(&report.origin, on, report.nccl.as_ref(), Some(&first.head));
    let lines = RowTable::of(report.rows.iter().map(|row| row.head.clone()));
    let rows: String = report.rows.iter().map(|row| lines.row(row)).collect();
    setup
        + &of_rounds(&report.transport, first.samples)
        + &lines.head()
        + &rows
        + &sustained_table(&report.rows)
}

#[test]
fn a_machine_without_gpus_has_no_number_of_them() {
    assert_eq!(Origin::of_a_test("a GPU", 4, "").machine(), "4 x a GPU");
    assert_eq!(Origin::of_a_test("host (2 ranks)", 0, "").machine(), "host (2 ranks)");
}

#[test]
fn a_row_derives_its_figures_from_the_medians() {
    let row = &report().rows[0];
    assert!((row.ect_ms - 0.13).abs() < 1e-9);
    assert!((row.overlap_efficiency.unwrap() - 0.75).abs() < 1e-9);
    assert!((row.tflops - 715.0).abs() < 0.1, "{}", row.tflops);
}

#[test]
fn the_file_has_the_fields_of_the_schema_and_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    let report = report();
    crate::atomic_file::write_json(&path, &report).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);

    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys = |v: &serde_json::Value| {
        let mut keys: Vec<_> = v.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys.join(" ")
    };
    assert_eq!(
        keys(&json),
        "command commit cuda date device driver gpus hosts machines nccl ranks rows schema \
         transport"
    );
    assert_eq!(
        keys(&json["rows"][0]),
        "dtype ect_ms k m max_rel_err model n op overlap_efficiency plan samples t_comm_ms \
         t_gemm_ms t_op_ms t_serial_ms tflops tp verified"
    );
    assert_eq!(keys(&json["rows"][0]["t_op_ms"]), "median p10 p90");
}

#[test]
fn a_file_of_before_ranks_could_be_processes_is_one_of_threads() {
    let mut json = serde_json::to_value(report()).unwrap();
    for field in ["ranks", "hosts", "machines"] {
        json.as_object_mut().unwrap().remove(field).unwrap();
    }
    assert_eq!(serde_json::from_value::<Report>(json).unwrap().placement, Placement::THREADS);
    let apart = Placement { ranks: Ranks::Processes, hosts: 2, machines: 1 };
    let json = serde_json::to_value(Report { placement: apart, ..report() }).unwrap();
    assert_eq!(
        (&json["ranks"], &json["hosts"], &json["machines"]),
        (&"processes".into(), &2.into(), &1.into())
    );
    assert_eq!(serde_json::from_value::<Report>(json).unwrap().placement, apart);
    let text = table(&Report { placement: apart, ..report() });
    assert!(
        text.starts_with(
            "a device, transport nvlink, TP 8, bf16, ranks as processes of 2 hosts, which are one \
             machine for a test, "
        ),
        "{text}"
    );
}

#[test]
fn rounds_that_were_left_out_are_told() {
    let mut report = report();
    assert!(!table(&report).contains("late"));
    report.rows[0].late = Late { op: 3, serial: 1, ..Late::default() };
    assert!(
        table(&report).lines().any(|l| l.ends_with("yes, 1.5e-3, 3 late")),
        "{}",
        table(&report)
    );
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(
        json["rows"][0]["late"],
        serde_json::json!({ "op": 3, "gemm": 0, "comm": 0, "serial": 1 })
    );
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
}

#[test]
fn rows_that_the_serial_path_adds_are_told() {
    let mut report = report();
    assert!(!table(&report).contains("pads"));
    report.rows[0].serial_m = Some(8200);
    let told = "  yes, 1.5e-3, serial pads m to 8200";
    assert!(table(&report).lines().any(|line| line.ends_with(told)), "{}", table(&report));
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["rows"][0]["serial_m"], 8200);
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
}

#[test]
fn a_table_that_is_printed_row_by_row_is_aligned() {
    let lines = RowTable::of([report().rows[0].head.clone()].into_iter());
    let ends = |line: String| line.find("  T_op ms").or(line.find("1.730")).unwrap();
    assert_eq!(ends(lines.head()) + "  T_op ms".len(), ends(lines.row(&report().rows[0])) + 5);
}

#[test]
fn what_hosts_take_to_enqueue_is_told_where_it_was_measured() {
    let mut report = report();
    let cell = |report: &Report| {
        table(report).lines().last().unwrap().split_whitespace().nth(7).unwrap().to_owned()
    };
    assert_eq!(
        (
            cell(&report).as_str(),
            serde_json::to_value(&report).unwrap()["rows"][0].get("enqueue_ms")
        ),
        ("-", None)
    );
    report.rows[0].enqueue_ms =
        Some(Each { op: flat(0.012), gemm: flat(0.004), comm: flat(0.009), serial: flat(0.013) });
    assert_eq!(cell(&report), "0.012");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["rows"][0]["enqueue_ms"]["serial"]["p90"], 0.013);
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
}

#[test]
fn the_table_shows_a_row_that_failed_verification() {
    let mut report = report();
    assert!(table(&report).lines().any(|l| l.ends_with("yes, 1.5e-3")), "{}", table(&report));
    report.rows[0].verified = false;
    assert!(table(&report).lines().any(|l| l.ends_with("  NO")), "{}", table(&report));
    assert!(!report.verified());
}

#[test]
fn an_efficiency_within_the_noise_is_not_shown() {
    let mut report = report();
    assert!(table(&report).contains("  75.0  "), "{}", table(&report));
    report.rows[0].t_gemm_ms.p90 += 0.6;
    assert!(!table(&report).contains("  75.0  "), "{}", table(&report));
}

#[test]
fn an_efficiency_of_few_samples_is_not_shown() {
    let mut report = report();
    for (samples, shown) in [(1, false), (2, false), (4, false), (5, true)] {
        report.rows[0].samples = samples;
        assert_eq!(table(&report).contains("  75.0  "), shown, "{samples}: {}", table(&report));
    }
    // Of five rounds one is left out, or three are late, and none is.
    for (late, shown) in [(1, false), (3, true)] {
        report.rows[0].late = Late { gemm: late, ..Late::default() };
        assert_eq!(table(&report).contains("  75.0  "), shown, "{late} late: {}", table(&report));
    }
    let measured = Measured {
        times: Each { op: flat(1.73), gemm: flat(1.6), comm: flat(0.57), serial: flat(2.12) },
        late: Late::default(),
        enqueue: None,
    };
    let sustained =
        |blocks| Sustained::new(1.0, blocks, [flat(1.8), flat(1.6), flat(2.6)], &measured.times);
    for (blocks, shown) in [(2, false), (5, true)] {
        report.rows[0].sustained = Some(sustained(blocks));
        assert_eq!(table(&report).contains(" 80.0 "), shown, "{blocks}: {}", table(&report));
    }
}

#[test]
fn a_file_says_which_libraries_made_it_unless_it_is_older() {
    let origin = |report: &Report| Origin {
        cublaslt: Some("13.1.0".to_owned()),
        nvrtc: Some("13.0".to_owned()),
        ..report.origin.clone()
    };
    let known = Report { origin: origin(&report()), ..report() };
    let mut json = serde_json::to_value(&known).unwrap();
    assert_eq!((&json["cublaslt"], &json["nvrtc"]), (&"13.1.0".into(), &"13.0".into()));
    assert_eq!(serde_json::from_value::<Report>(json.clone()).unwrap(), known);
    for field in ["cublaslt", "nvrtc"] {
        json.as_object_mut().unwrap().remove(field).unwrap();
    }
    assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report());
    let host = Origin { gpus: 0, ..report().origin };
    assert_eq!(host.clone().with_libraries(), host);
}

#[test]
fn a_table_of_the_host_says_what_it_shows() {
    let said = |transport: &str| {
        table(&Report { transport: transport.to_owned(), ..report() })
            .contains("not what fusion gains")
    };
    assert!(said("host") && !said("nvlink"));
}
