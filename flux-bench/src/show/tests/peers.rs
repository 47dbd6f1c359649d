//! What peers took, beside the ops.

use super::*;
use crate::report::PeerRow;

fn times(op: OpKind, m: usize, (serial, fused): (f64, Option<f64>)) -> PeerRow {
    let why = fused.is_none().then(|| "RuntimeError: no".to_owned());
    PeerRow {
        head: row(op, m, 1.0).head,
        gemm_ms: Some(flat(1.0)),
        serial_ms: Some(flat(serial)),
        async_tp_ms: fused.map(flat),
        one_shot_ms: None,
        two_shot_ms: None,
        late: std::collections::BTreeMap::new(),
        why,
        verified: true,
        samples: 30,
    }
}

/// At two of the three shapes of [`both_ops`], and one that it does not have.
fn peers() -> PeersReport {
    PeersReport {
        schema: PEERS_SCHEMA,
        origin: crate::report::Origin::of_a_test("A <GPU>", 4, "flux-bench peers"),
        nccl: "2.28.9".into(),
        torch: "2.11.0+cu130".into(),
        rows: vec![
            times(OpKind::AllGatherGemm, 64, (1.0, None)),
            times(OpKind::AllGatherGemm, 512, (1.6, Some(3.4))),
            times(OpKind::AllGatherGemm, 1024, (1.7, Some(1.3))),
        ],
    }
}

#[test]
fn the_table_has_a_column_of_the_best_peer() {
    let text = markdown(&both_ops(), Some(&peers()));
    for end in [
        "| E % | best peer ms |",
        "| 20.0 | 1.600 (serial) |",
        "| 60.0 | 1.300 (async-TP) |",
        "| 80.0 | - |",
    ] {
        assert!(text.lines().any(|l| l.ends_with(end)), "{end}: {text}");
    }
    assert!(
        text.contains(
            "PyTorch 2.11.0+cu130, NCCL 2.28.9,\n30 rounds on 2026-11-21: `flux-bench peers`.\n"
        ),
        "{text}"
    );
    let cells: Vec<_> =
        text.lines().filter(|l| l.starts_with('|')).map(|l| l.matches('|').count()).collect();
    assert!(cells.iter().all(|&n| n == cells[0]), "{text}");
}

#[test]
fn the_picture_has_the_peers_and_tells_the_value_of_a_point_above_it() {
    let (plain, picture) = (svg(&both_ops(), None), svg(&both_ops(), Some(&peers())));
    let count = |picture: &str, what: &str| picture.matches(what).count();
    // A bar for the efficiency of each row.
    assert_eq!((count(&plain, "<path"), count(&plain, "PyTorch")), (3, 0));
    // Two points of each of two peers, and as many in the legend.
    let peers = count(&picture, "<path") - count(&plain, "<path");
    assert_eq!((peers, count(&picture, "PyTorch 2.11.0 ")), (2 * 2 + 2 * 2, 2));
    assert_eq!(count(&picture, "<polyline"), count(&plain, "<polyline") + 2 + 2);
    assert_eq!(count(&picture, ">3.4</text>"), 1, "{picture}");
    assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
}

#[test]
fn peers_that_must_not_be_shown_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.json");
    let refused = |change: fn(&mut PeersReport)| {
        let mut peers = peers();
        change(&mut peers);
        atomic_file::write_json(&path, &peers).unwrap();
        read_peers(&path, &both_ops()).unwrap_err().to_string()
    };
    atomic_file::write_json(&path, &peers()).unwrap();
    assert_eq!(read_peers(&path, &both_ops()).unwrap(), peers());
    assert!(
        refused(|p| p.rows[1].verified = false).ends_with(
            "ag_gemm gpt3 m 512: the result was not verified, so its times are not shown"
        )
    );
    assert!(
        refused(|p| p.origin.device = "B".into())
            .ends_with("was measured on 4 x B, and the ops on 4 x A <GPU>")
    );
    assert!(
        refused(|p| p.rows.truncate(1))
            .ends_with("none of the shapes that it is to be shown beside")
    );
    let of_fp16 = refused(|p| p.rows.iter_mut().for_each(|row| row.head.dtype = "fp16".into()));
    assert!(of_fp16.ends_with("none of the shapes that it is to be shown beside"), "{of_fp16}");
    assert!(refused(|p| p.schema = 2).contains("has schema 2"));
    assert!(refused(|p| p.rows[0].serial_ms = Some(flat(0.0))).contains("cannot be compared"));
}
