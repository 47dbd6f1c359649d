//! What each launcher's variables say, whole, in part, and against each other.

use super::*;

fn parse(vars: &[(&str, &str)]) -> Result<Environment, BootstrapError> {
    Environment::parse(&|name| {
        vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
    })
}

const OWN_SET: [(&str, &str); 4] = [
    ("FLUX_RANK", "1"),
    ("FLUX_WORLD_SIZE", "4"),
    ("FLUX_LOCAL_RANK", "1"),
    ("FLUX_RENDEZVOUS", "/run/x"),
];
const TORCH_SET: [(&str, &str); 6] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "3"),
    ("LOCAL_WORLD_SIZE", "8"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29500"),
];

const OPEN_MPI_SET: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "8"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "8"),
    ("PMIX_NAMESPACE", "prterun-node1-77@1"),
];
const MPICH_SET: [(&str, &str); 4] =
    [("PMI_RANK", "3"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "3"), ("MPI_LOCALNRANKS", "8")];
const SLURM_SET: [(&str, &str); 6] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "3"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_NODES", "1"),
];

fn host_place(env: &Environment) -> HostPlace {
    let Place::Host(place) = &env.place else { panic!("on several hosts: {env:?}") };
    place.clone()
}

fn with(
    set: &[(&'static str, &'static str)],
    name: &str,
    value: &'static str,
) -> Vec<(&'static str, &'static str)> {
    set.iter().map(|&(key, old)| (key, if key == name { value } else { old })).collect()
}

#[test]
fn own_family_comes_before_torchruns() {
    let both: Vec<_> = OWN_SET.iter().chain(&TORCH_SET).copied().collect();
    let env = parse(&both).unwrap();
    assert_eq!((env.rank, env.world.get(), env.local_rank), (Rank::new(1), 4, 1));
    let place = host_place(&env);
    assert_eq!((place.directory, place.made_by_leader), (PathBuf::from("/run/x"), false));
}

#[test]
fn torchrun_names_a_directory_of_user_and_run() {
    let env = parse(&TORCH_SET).unwrap();
    assert_eq!((env.rank, env.world.get(), env.local_rank), (Rank::new(3), 8, 3));
    let place = host_place(&env);
    assert!(place.made_by_leader);
    let uid = rustix::process::getuid().as_raw();
    assert!(
        place.directory.file_name().unwrap().to_str().unwrap().starts_with(&format!("flux-{uid}-"))
    );
    let other_port = parse(&with(&TORCH_SET, "MASTER_PORT", "29501")).unwrap();
    assert_ne!(place.directory, host_place(&other_port).directory);
    let other_run: Vec<_> =
        TORCH_SET.iter().copied().chain([("TORCHELASTIC_RUN_ID", "b")]).collect();
    assert_ne!(place.nonce, host_place(&parse(&other_run).unwrap()).nonce);
    let same_run_other_rank =
        parse(&with(&with(&TORCH_SET, "RANK", "4"), "LOCAL_RANK", "4")).unwrap();
    assert_eq!(env.place, same_run_other_rank.place);
}

#[test]
fn no_variable_is_no_launcher() {
    assert!(matches!(parse(&[]), Err(BootstrapError::NoLauncher)));
    assert!(matches!(
        parse(&[("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]),
        Err(BootstrapError::NoLauncher)
    ));
    assert!(matches!(
        parse(&[("FLUX_RENDEZVOUS", "/run/x"), ("FLUX_LAUNCHER", "")]),
        Err(BootstrapError::NoLauncher)
    ));
}

#[test]
fn what_a_job_has_set_does_not_count_where_the_launcher_is_none() {
    let (half, whole) = (&[("WORLD_SIZE", "8"), ("RANK", "3")][..], &TORCH_SET[..]);
    let text = parse(half).unwrap_err().to_string();
    assert!(text.starts_with("half a launcher: ") && text.contains("FLUX_LAUNCHER=none"), "{text}");
    for set in [half, whole, &OWN_SET, &SLURM_SET, &[("WORLD_SIZE", "32")]] {
        assert!(
            matches!(
                parse(&[set, &[("FLUX_LAUNCHER", "none")]].concat()),
                Err(BootstrapError::NoLauncher)
            ),
            "{set:?}"
        );
    }
}

#[test]
fn a_job_that_is_too_large_is_told_how_to_make_groups() {
    let text = parse(&with(&TORCH_SET, "WORLD_SIZE", "32")).unwrap_err().to_string();
    let parts = [
        "WORLD_SIZE = \"32\" is not a world size from 1 to 16",
        "World::builder",
        "docs/deployment.md",
        "FLUX_LAUNCHER=none",
    ];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn the_variable_that_places_a_rendezvous_directory_is_known() {
    let of = |vars: &[(&str, &str)], directory: &str| {
        variable_of(directory.as_ref(), &|name| {
            vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    };
    assert_eq!(of(&[("TMPDIR", "/a/b")], "/a/b/flux-0-1"), Some("TMPDIR"));
    assert_eq!(
        of(&[("TMPDIR", "/a/b"), ("XDG_RUNTIME_DIR", "/")], "/flux-0-1"),
        Some("XDG_RUNTIME_DIR")
    );
    // As `flux-bench launch` sets it.
    assert_eq!(of(&[("TMPDIR", "/a/b"), ("FLUX_RENDEZVOUS", "/a/b/c")], "/a/b/c"), Some("TMPDIR"));
    assert_eq!(of(&[("TMPDIR", "/a/b"), ("FLUX_RENDEZVOUS", "/c")], "/c"), Some("FLUX_RENDEZVOUS"));
    assert_eq!(of(&[], "/c"), None);
}

#[test]
fn every_launcher_seats_the_rank_on_one_host() {
    for set in [&TORCH_SET[..], &OPEN_MPI_SET, &MPICH_SET, &SLURM_SET] {
        let env = parse(set).unwrap();
        assert_eq!((env.rank, env.world.get(), env.local_rank), (Rank::new(3), 8, 3), "{set:?}");
        assert!(host_place(&env).made_by_leader, "{set:?}");
        // The same launch again is met at the same place; with a place of its own, there.
        assert_eq!(env, parse(set).unwrap());
        let there: Vec<_> = set.iter().copied().chain([("FLUX_RENDEZVOUS", "/run/x")]).collect();
        assert_eq!(host_place(&parse(&there).unwrap()).directory, PathBuf::from("/run/x"));
        let empty: Vec<_> = set.iter().copied().chain([("FLUX_RENDEZVOUS", "")]).collect();
        assert_eq!(parse(&empty).unwrap(), env, "as if it were not set");
    }
    let jobs = ["7", "8"]
        .map(|job| host_place(&parse(&with(&SLURM_SET, "SLURM_JOB_ID", job)).unwrap()).directory);
    assert_ne!(jobs[0], jobs[1]);
}

#[test]
fn a_batch_script_and_an_interactive_shell_of_slurm_are_no_launch() {
    let batch: Vec<_> =
        SLURM_SET.iter().filter(|(name, _)| *name != "SLURM_STEP_ID").copied().collect();
    let shell = with(&SLURM_SET, "SLURM_STEP_ID", "4294967290");
    for set in [batch, shell] {
        assert!(matches!(parse(&set), Err(BootstrapError::NoLauncher)), "{set:?}");
        let inside: Vec<_> = set.iter().chain(&OPEN_MPI_SET).copied().collect();
        assert_eq!(parse(&inside).unwrap().rank, Rank::new(3));
    }
}

#[test]
fn what_srun_sets_for_mpi_is_sruns() {
    let set: Vec<_> = SLURM_SET.iter().chain(&MPICH_SET[..2]).copied().collect();
    assert_eq!(parse(&set).unwrap().place, parse(&SLURM_SET).unwrap().place);
}

#[test]
fn launchers_inside_a_slurm_step_count_before_it() {
    // srun starts one torchrun per node: its own rank is the node's.
    let step = with(&with(&SLURM_SET, "SLURM_PROCID", "1"), "SLURM_NTASKS", "2");
    let set: Vec<_> = step.iter().chain(&TORCH_SET).copied().collect();
    assert_eq!(parse(&set).unwrap(), parse(&TORCH_SET).unwrap());
}

#[test]
fn two_launchers_that_disagree_are_both_named_unless_one_is_chosen() {
    let agree: Vec<_> = TORCH_SET.iter().chain(&OPEN_MPI_SET).copied().collect();
    assert_eq!(parse(&agree).unwrap(), parse(&TORCH_SET).unwrap());
    for (name, value) in [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "16")] {
        let set = with(&agree, name, value);
        let error = parse(&set).unwrap_err();
        assert!(matches!(error, BootstrapError::Disagreement { .. }), "{error}");
        let text = error.to_string();
        assert!(
            ["torchrun", "openmpi", "rank 3 of 8", name, "FLUX_LAUNCHER"]
                .iter()
                .all(|part| text.contains(part)),
            "{text}"
        );
        let chosen = |name| parse(&[&set[..], &[("FLUX_LAUNCHER", name)]].concat());
        assert_eq!(chosen("torchrun").unwrap(), parse(&TORCH_SET).unwrap());
        assert!(chosen("openmpi").map_or(true, |env| env != parse(&TORCH_SET).unwrap()));
        assert!(matches!(chosen("slurm"), Err(BootstrapError::HalfSet { missing, .. })
                if missing.len() == 5));
        assert!(matches!(
            chosen("pigeon"),
            Err(BootstrapError::Variable { variable: "FLUX_LAUNCHER", .. })
        ));
    }
}

#[test]
fn each_missing_variable_of_a_family_is_named() {
    for set in [&OWN_SET[..], &TORCH_SET, &OPEN_MPI_SET[..4], &MPICH_SET, &SLURM_SET[..4]] {
        for left_out in 0..set.len() {
            let vars: Vec<_> = set
                .iter()
                .enumerate()
                .filter(|(i, _)| *i != left_out)
                .map(|(_, var)| *var)
                .collect();
            // Without its mark, a step is none.
            let mark = [("SLURM_STEP_ID", "0")];
            let vars = if set[0].0.starts_with("SLURM") && set[left_out].0 != "SLURM_PROCID" {
                [&vars[..], &mark].concat()
            } else {
                vars
            };
            let vars = if set[left_out].0 == "SLURM_PROCID" {
                [&vars[..], &mark, &[("FLUX_LAUNCHER", "slurm")]].concat()
            } else {
                vars
            };
            let Err(BootstrapError::HalfSet { missing, set: there }) = parse(&vars) else {
                panic!("{vars:?}")
            };
            assert_eq!(missing, [set[left_out].0]);
            assert!(!there.is_empty());
        }
    }
}

#[test]
fn contradictions_name_the_variable() {
    let wrong = |vars: Vec<(&str, &str)>, name: &str| {
        let error = parse(&vars).unwrap_err();
        assert!(
            matches!(&error, BootstrapError::Variable { variable, .. } if *variable == name),
            "{error}"
        );
        assert!(error.to_string().contains(name));
    };
    for (set, name, value) in [
        (&OWN_SET[..], "FLUX_RANK", "4"),
        (&OWN_SET, "FLUX_RANK", "-1"),
        (&OWN_SET, "FLUX_RANK", ""),
        (&OWN_SET, "FLUX_LOCAL_RANK", "9"),
        (&OWN_SET, "FLUX_WORLD_SIZE", "0"),
        (&OWN_SET, "FLUX_WORLD_SIZE", "17"),
        (&OWN_SET, "FLUX_RENDEZVOUS", "relative"),
        (&OWN_SET, "FLUX_RENDEZVOUS", "tcp://node1"),
        (&OWN_SET, "FLUX_RENDEZVOUS", "tcp://node1:0"),
        (&OWN_SET, "FLUX_RENDEZVOUS", "tcp://:29600"),
        (&OWN_SET, "FLUX_RENDEZVOUS", "tcp://[node1]:29600"),
        (&TORCH_SET, "RANK", "8"),
        (&TORCH_SET, "LOCAL_RANK", "8"),
        (&TORCH_SET, "LOCAL_WORLD_SIZE", "9"),
        (&TORCH_SET, "WORLD_SIZE", "eight"),
        (&OPEN_MPI_SET, "OMPI_COMM_WORLD_RANK", "8"),
        (&OPEN_MPI_SET, "OMPI_COMM_WORLD_LOCAL_SIZE", "9"),
        (&MPICH_SET, "PMI_SIZE", "17"),
        (&MPICH_SET, "MPI_LOCALRANKID", "8"),
        (&SLURM_SET, "SLURM_PROCID", "8"),
        (&SLURM_SET, "SLURM_LOCALID", "x"),
        (&SLURM_SET, "SLURM_STEP_NUM_NODES", "two"),
    ] {
        wrong(with(set, name, value), name);
    }
    let several = with(&TORCH_SET, "LOCAL_WORLD_SIZE", "4");
    // A directory is no place for several hosts.
    wrong([&several[..], &[("FLUX_RENDEZVOUS", "/run/x")]].concat(), "FLUX_RENDEZVOUS");
    wrong([&several[..], &[("FLUX_RENDEZVOUS", "tcp://node1:29500")]].concat(), "FLUX_RENDEZVOUS");
}

const SECRET: (&str, &str) = ("FLUX_SECRET", "0123456789abcdef");

fn network_place(vars: &[(&str, &str)]) -> NetworkPlace {
    let Place::Network(place) = parse(&[vars, &[SECRET]].concat()).unwrap().place else {
        panic!("on one host: {vars:?}")
    };
    place
}

#[test]
fn several_hosts_need_a_secret_and_are_told_how_to_set_it() {
    let several = with(&TORCH_SET, "LOCAL_WORLD_SIZE", "4");
    let error = parse(&several).unwrap_err();
    assert!(matches!(error, BootstrapError::NoSecret));
    let text = error.to_string();
    assert!(
        ["FLUX_SECRET_FILE", "0600", "/dev/urandom", "FLUX_SECRET,"]
            .iter()
            .all(|part| text.contains(part)),
        "{text}"
    );
    assert!(matches!(
        parse(&[&several[..], &[("FLUX_SECRET", "short")]].concat()),
        Err(BootstrapError::Secret { .. })
    ));
}

#[test]
fn torchruns_ranks_on_several_hosts_meet_at_ports_of_their_own() {
    let several = with(&TORCH_SET, "LOCAL_WORLD_SIZE", "4");
    let place = network_place(&several);
    assert_eq!(place.address.host(), "127.0.0.1");
    assert_eq!(place, network_place(&with(&several, "RANK", "2")), "all ranks know the same place");
    // Whatever MASTER_PORT is, it is never among them.
    for &port in place.address.ports() {
        let place = network_place(&with(
            &several,
            "MASTER_PORT",
            Box::leak(port.to_string().into_boxed_str()),
        ));
        assert!(!place.address.ports().contains(&port) && place.address.ports().len() >= 7);
    }
}

#[test]
fn an_agents_count_of_restarts_names_a_launch_of_one_agent_only() {
    let restarted = |set: &[(&'static str, &'static str)]| {
        let counted = ["0", "1"].map(|count| {
            parse(&[set, &[("TORCHELASTIC_RESTART_COUNT", count), SECRET]].concat()).unwrap().place
        });
        counted[0] != counted[1]
    };
    assert!(restarted(&TORCH_SET), "a restarted group is told from the one before");
    assert!(
        !restarted(&with(&TORCH_SET, "LOCAL_WORLD_SIZE", "4")),
        "agents that have restarted their ranks more or less often meet"
    );
}

#[test]
fn an_ipv6_address_of_rank_0_may_be_in_brackets() {
    let several = with(&TORCH_SET, "LOCAL_WORLD_SIZE", "4");
    for text in ["::1", "[::1]"] {
        assert_eq!(network_place(&with(&several, "MASTER_ADDR", text)).address.host(), "::1");
    }
}

#[test]
fn slurms_ranks_on_several_hosts_meet_at_the_first_node() {
    let several = with(&SLURM_SET, "SLURM_STEP_NUM_NODES", "2");
    let list = ("SLURM_STEP_NODELIST", "gpu[03-04]");
    assert_eq!(network_place(&[&several[..], &[list]].concat()).address.host(), "gpu03");
    let without = |name: &str| {
        several.iter().copied().filter(|(set, _)| *set != name).chain([SECRET]).collect::<Vec<_>>()
    };
    for (vars, name) in [
        (without("SLURM_STEP_NUM_NODES"), "SLURM_STEP_NUM_NODES"),
        (without(""), "SLURM_STEP_NODELIST"),
    ] {
        let error = parse(&vars).unwrap_err();
        assert!(
            matches!(&error, BootstrapError::HalfSet { missing, set }
                if missing[..] == [name] && set.contains(&"SLURM_PROCID")),
            "{error}"
        );
    }
    let broken = [&several[..], &[SECRET, ("SLURM_STEP_NODELIST", "gpu[")]].concat();
    assert!(matches!(
        parse(&broken),
        Err(BootstrapError::Variable { variable: "SLURM_STEP_NODELIST", .. })
    ));
}

#[test]
fn mpis_ranks_on_several_hosts_are_told_where_to_meet() {
    for (set, local) in
        [(&OPEN_MPI_SET[..], "OMPI_COMM_WORLD_LOCAL_SIZE"), (&MPICH_SET, "MPI_LOCALNRANKS")]
    {
        let several = with(set, local, "4");
        let error = parse(&[&several[..], &[SECRET]].concat()).unwrap_err();
        assert!(
            matches!(error, BootstrapError::NoAddress { .. })
                && error.to_string().contains("FLUX_RENDEZVOUS=tcp://"),
            "{error}"
        );
        let said =
            network_place(&[&several[..], &[("FLUX_RENDEZVOUS", "tcp://node1:29600")]].concat());
        assert_eq!((said.address.host(), said.address.ports()), ("node1", &[29600][..]));
        let master = network_place(
            &[&several[..], &[("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")]].concat(),
        );
        assert_eq!(master.address.host(), "node1");
    }
}

#[test]
fn an_own_launch_may_say_an_address_and_what_sets_it_apart() {
    let set = with(&OWN_SET, "FLUX_RENDEZVOUS", "tcp://[fe80::1]:29600");
    let place = network_place(&[&set[..], &[("FLUX_HOST_ID", "left")]].concat());
    assert_eq!((place.address.host(), place.host_id), ("fe80::1", Some("left".into())));
}
