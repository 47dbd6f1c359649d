//! `flux-bench run`: real operands give the right output file, and every failure gives a sentence,
//! an exit status and no file.

use crate::run_support::Case;
use safetensors::Dtype;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn words(case: &Case, op: &str, ranks: &str, output: &Path) -> Vec<String> {
    let (input, output) = (case.input().display().to_string(), output.display().to_string());
    ["run", op, "--ranks", ranks, "--transport", "host", "--input", &input, "--output", &output]
        .map(str::to_owned)
        .to_vec()
}

fn run(case: &Case, op: &str, ranks: &str) -> Output {
    program().args(words(case, op, ranks, &case.output())).output().unwrap()
}

/// The run fails, says `what`, and leaves nothing but the input and `also`.
fn refused(case: &Case, output: &Output, what: &str, also: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains(what), "{error}");
    let mut names: Vec<String> = std::fs::read_dir(case.folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut wanted: Vec<&str> = also.iter().copied().chain(["in.safetensors"]).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_flux-bench"))
}

#[test]
fn both_ops_write_the_whole_product_in_both_types() {
    for (dtype, op, ranks) in [
        (Dtype::BF16, "ag-gemm", "4"),
        (Dtype::F16, "gemm-rs", "8"),
        (Dtype::F16, "ag-gemm", "1"),
        (Dtype::BF16, "gemm-rs", "3"),
    ] {
        let case = Case::new(dtype);
        let done = run(&case, op, ranks);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        case.assert_product(&format!("{op} on {ranks} ranks"));
    }
}

#[test]
fn a_truncated_file_is_refused() {
    let case = Case::new(Dtype::BF16);
    let whole = std::fs::read(case.input()).unwrap();
    std::fs::write(case.input(), &whole[..whole.len() - 2]).unwrap();
    refused(&case, &run(&case, "ag-gemm", "2"), "is not a whole safetensors file", &[]);
}

#[test]
fn an_input_that_is_missing_is_named() {
    let case = Case::new(Dtype::BF16);
    let mut words = words(&case, "ag-gemm", "2", &case.output());
    words[7] = case.folder.path().join("none.safetensors").display().to_string();
    refused(
        &case,
        &program().args(words).output().unwrap(),
        "none.safetensors cannot be read: No such file or directory (os error 2)\n",
        &[],
    );
}

#[test]
fn a_world_with_more_ranks_than_groups_of_columns_is_refused() {
    let case = Case::new(Dtype::BF16);
    refused(
        &case,
        &run(&case, "ag-gemm", "16"),
        "n = 64 is too small for 16 ranks of at least 8 each: pad n with zeros to 128",
        &[],
    );
    refused(&case, &run(&case, "ag-gemm", "17"), "--ranks 17 is outside 1 to 16", &[]);
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_the_work() {
    let case = Case::new(Dtype::BF16);
    let folder = program().args(words(&case, "ag-gemm", "2", case.folder.path())).output().unwrap();
    refused(&case, &folder, "is not a regular file", &[]);
    let missing = program()
        .args(words(&case, "ag-gemm", "2", &case.folder.path().join("no/y.safetensors")))
        .output()
        .unwrap();
    refused(&case, &missing, "/no: No such file or directory (os error 2)\n", &[]);
}

/// Names of one file are told by the file: the name that is replaced may be the last that leads to
/// the operands.
#[test]
fn an_output_that_is_the_input_is_refused_and_the_input_stays() {
    let case = Case::new(Dtype::BF16);
    let before = std::fs::read(case.input()).unwrap();
    let (hard, soft) = (case.folder.path().join("hard"), case.folder.path().join("soft"));
    std::fs::hard_link(case.input(), &hard).unwrap();
    std::os::unix::fs::symlink(case.input(), &soft).unwrap();
    let dotted = case.folder.path().join("./in.safetensors");
    for (input, output) in [
        (case.input(), case.input()),
        (case.input(), dotted),
        (soft.clone(), case.input()),
        (case.input(), soft),
        (case.input(), hard),
    ] {
        let mut words = words(&case, "ag-gemm", "2", &output);
        words[7] = input.display().to_string();
        refused(
            &case,
            &program().args(words).output().unwrap(),
            "is the file of --input",
            &["hard", "soft"],
        );
        assert_eq!(std::fs::read(&input).unwrap(), before, "{}", output.display());
    }
}

/// A limit on the size of files, with its signal ignored, makes writes fail half way, as a full
/// disk does.
#[test]
fn a_disk_that_fills_up_leaves_the_old_output_alone() {
    let case = Case::new(Dtype::BF16);
    std::fs::write(case.output(), "old").unwrap();
    let words = words(&case, "ag-gemm", "2", &case.output());
    let mut shell = Command::new("sh");
    shell
        .args([
            "-c",
            r#"trap "" XFSZ; ulimit -f 1; exec "$@""#,
            "sh",
            env!("CARGO_BIN_EXE_flux-bench"),
        ])
        .args(words);
    refused(&case, &shell.output().unwrap(), "was not written", &["out.safetensors"]);
    assert_eq!(std::fs::read(case.output()).unwrap(), b"old");
}

#[test]
fn a_bias_and_an_activation_are_applied_and_what_is_not_used_is_named() {
    for (op, ranks) in [("ag-gemm", "4"), ("gemm-rs", "2")] {
        let case = Case::with_bias(Dtype::BF16);
        let done = run(&case, op, ranks);
        assert!(done.status.success(), "{done:?}");
        assert_eq!(String::from_utf8_lossy(&done.stderr).lines().count(), 1, "{done:?}");
        assert!(
            String::from_utf8_lossy(&done.stderr)
                .ends_with("in.safetensors has tensors that are not used: scale\n"),
            "{done:?}"
        );
        case.assert_product(op);
    }
    let case = Case::with_bias(Dtype::F16).rectified();
    let words = [
        words(&case, "ag-gemm", "2", &case.output()),
        ["--activation", "relu"].map(str::to_owned).to_vec(),
    ]
    .concat();
    assert!(program().args(words).output().unwrap().status.success());
    case.assert_product("relu");
    let words = [
        self::words(&case, "gemm-rs", "2", &case.output()),
        ["--activation", "relu"].map(str::to_owned).to_vec(),
    ]
    .concat();
    refused(
        &case,
        &program().args(words).output().unwrap(),
        "gemm_rs has no activation: only ag_gemm has one",
        &["out.safetensors"],
    );
}

#[test]
fn an_input_that_may_have_no_end_is_refused() {
    let case = Case::new(Dtype::BF16);
    let pipe = case.folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [pipe.to_str().unwrap(), "/dev/zero", "/"] {
        let mut words = words(&case, "ag-gemm", "2", &case.output());
        words[7] = path.to_owned();
        // A limit, as a pipe would be waited for and the device fill the memory.
        let mut limited = Command::new("timeout");
        limited
            .args([
                "20",
                "sh",
                "-c",
                r#"ulimit -v 8000000; exec "$@""#,
                "sh",
                env!("CARGO_BIN_EXE_flux-bench"),
            ])
            .args(words);
        refused(
            &case,
            &limited.output().unwrap(),
            &format!("{path} cannot be read: it is not a regular file"),
            &["pipe"],
        );
    }
}

#[test]
fn an_output_at_a_link_is_written_to_its_file_which_keeps_its_mode() {
    let case = Case::new(Dtype::BF16);
    let link = case.folder.path().join("link");
    std::os::unix::fs::symlink("out.safetensors", &link).unwrap();
    std::fs::write(case.output(), "old").unwrap();
    std::fs::set_permissions(case.output(), Permissions::from_mode(0o600)).unwrap();
    let done = program().args(words(&case, "gemm-rs", "2", &link)).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    case.assert_product("behind a link");
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(std::fs::metadata(case.output()).unwrap().permissions().mode() & 0o777, 0o600);
}

/// `y = relu(gate) * up` of gates and ups in halves of `w`, or in turn.
#[test]
fn gates_are_those_of_the_whole_weight_whatever_the_ranks_are() {
    for (activation, interleaved) in [("reglu", false), ("reglu_interleaved", true)] {
        for ranks in ["1", "2", "3"] {
            let case = Case::with_bias(Dtype::BF16).gated(interleaved);
            let words = words(&case, "ag-gemm", ranks, &case.output());
            let done = program().args(words).args(["--gates", activation]).output().unwrap();
            assert!(done.status.success(), "{done:?}");
            case.assert_product(&format!("{activation} on {ranks} ranks"));
        }
    }
}

#[test]
fn a_residual_is_added_to_sums_and_their_rows_are_normalised_where_that_is_asked_for() {
    for (op, ranks) in [("gemm-rs", "3"), ("gemm-ar", "2")] {
        let case = Case::with_residual(Dtype::BF16);
        let done = program()
            .args(words(&case, op, ranks, &case.output()))
            .args(["--norm", "1e-6"])
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        case.assert_product(op);
        case.assert_norm(1e-6);
        let done = run(&case, op, ranks);
        assert!(String::from_utf8_lossy(&done.stderr).ends_with("not used: gain\n"), "{done:?}");
    }
    let case = Case::new(Dtype::BF16);
    let words = words(&case, "gemm-rs", "2", &case.output());
    let done = program().args(words).args(["--norm", "1e-6"]).output().unwrap();
    refused(&case, &done, "has no tensor \"gain\"", &[]);
}
