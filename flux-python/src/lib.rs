//! `flux_tp._native`: what the Python package `flux_tp` is built on.
//!
//! Invariant: no function holds the interpreter's lock while it waits for another rank, and a
//! signal ends the wait.

mod error;
mod group;
mod member;
mod operand;
mod ops;
mod signals;
mod torch;

use pyo3::prelude::*;

#[pymodule]
#[allow(clippy::needless_pass_by_value, reason = "PyO3 converts arguments to values of our own")]
mod _native {
    use crate::error::Error;
    use crate::group::GroupRendezvous;
    use crate::member::{self, Member};
    use crate::operand::{self, Dims, Library, activation, numerics, operand, scales, weight};
    use crate::ops::{Call, CallWeight, Kind, Limits, epsilon, total};
    use crate::signals::awaited;
    use flux_ops::binding::NamedActivation;
    use flux_ops::{
        DType, ElementType, EpilogueSpec, Extent, GateLayout, Location, MAX_WEIGHTS, NormSpec,
        Numerics, Operand, Partials, Problem, Scales, WeightLayout,
    };
    use flux_transport::{Communicator, Options, Rank, Select, Stream, World, WorldSize};
    use pyo3::prelude::*;
    use std::sync::Arc;
    use std::time::Duration;

    /// What names a communicator: its number, rank, world size, transport and CUDA device.
    type Connected = (u64, u32, u32, String, Option<u32>);
    /// An operand: address, dtype, dimensions, rows, columns, strides in elements.
    type Described = (u64, String, usize, usize, usize, (i64, i64));
    /// What an op is built with: dtypes of operands and of the output with the number of the form
    /// of scales, whether the weight is a transposed view, names of operands, activation, the
    /// norm's eps with the number of the form of scales, whether partial sums are in fp32.
    type Built = ((String, String, u64), bool, Vec<String>, u64, Option<(f64, u64)>, bool);
    /// `weight`, `out`, and of all ranks together `n` of an op that gathers or `k` of the others.
    type OfWeight = (Described, Described, Option<usize>);
    /// `x`, the weights, and the others by name: one, or one of each weight.
    type Operands = (Described, Vec<OfWeight>, Vec<(String, Vec<Described>)>);

    /// Shortest time for the ranks to come, which load their program first.
    const START: Duration = Duration::from_mins(1);

    /// Reads `timeout` and `transport`.
    fn options(transport: &str, timeout: f64, device: Option<u32>) -> Result<Options, Error> {
        let deadline = Duration::try_from_secs_f64(timeout).map_err(|error| {
            Error::operand(format!("timeout = {timeout}: {error}: give seconds above 0"))
        })?;
        let select: Select =
            transport.parse().map_err(|error| Error::operand(format!("transport: {error}")))?;
        Ok(Options { select, device, deadline, ..Options::default() })
    }

    fn connected(
        comm: Communicator,
        (max_m, sm_margin, batch_invariant): (usize, u32, bool),
    ) -> Connected {
        let (rank, world, transport) =
            (comm.rank().get(), comm.world_size().get(), comm.transport().to_string());
        let device = comm.device().info().map(|info| info.ordinal);
        (
            member::keep(Member::new(comm, Limits { max_m, sm_margin, batch_invariant })),
            rank,
            world,
            transport,
            device,
        )
    }

    /// Connects the ranks of the launcher.
    #[pyfunction]
    fn connect(
        py: Python<'_>,
        transport: &str,
        timeout: f64,
        device: Option<u32>,
        limits: (usize, u32, bool),
    ) -> PyResult<Connected> {
        let options = options(transport, timeout, device)?;
        let start = options.deadline.max(START);
        let comm = py.detach(|| awaited(member::connect_launched(start, options)))?;
        Ok(connected(comm?, limits))
    }

    /// Connects the ranks of a group, which exchange bytes by a callable: it takes this rank's, and
    /// returns those of all, by rank. `address` is this host's for other hosts.
    #[pyfunction]
    fn connect_group(
        py: Python<'_>,
        place: (u32, u32),
        exchange: Py<PyAny>,
        transport: &str,
        timeout: f64,
        device_and_address: (Option<u32>, Option<String>),
        limits: (usize, u32, bool),
    ) -> PyResult<Connected> {
        let (device, address) = device_and_address;
        let options = options(transport, timeout, device)?;
        let (rank, size) = place;
        let size = WorldSize::new(size).ok_or_else(|| {
            Error::operand(format!("a group of {size} ranks is not possible: 1 to 16 are"))
        })?;
        let mut builder =
            World::builder(Rank::new(rank), size).deadline(options.deadline.max(START));
        if let Some(text) = address {
            let unreadable = |_| Error::operand(format!("address = {text:?} is no IP address"));
            builder = builder.address(text.parse().map_err(unreadable)?);
        }
        let group = Arc::new(GroupRendezvous::new(exchange));
        let connect = async {
            let world = builder.meet(Arc::<GroupRendezvous>::clone(&group)).await?;
            Ok::<_, Error>(Communicator::connect(&world, options).await?)
        };
        let comm = py.detach(|| awaited(connect))?;
        if let Some(raised) = group.take_raised() {
            return Err(raised);
        }
        Ok(connected(comm?, limits))
    }

    /// Leaves a communicator.
    #[pyfunction]
    fn close(py: Python<'_>, comm: u64) {
        py.detach(|| member::close(comm));
    }

    /// Leaves all communicators.
    #[pyfunction]
    fn close_all(py: Python<'_>) {
        py.detach(member::close_all);
    }

    /// Runs without the interpreter's lock; a signal aborts the communicator.
    fn with<T: Send>(
        py: Python<'_>,
        comm: u64,
        run: impl FnOnce(&Member) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| {
            let member = member::named(comm)?;
            let member = member::here(&*member)?;
            Ok(member.hearing_signals(run)??)
        })
    }

    /// Raises the fault that broke the communicator.
    #[pyfunction]
    fn check(py: Python<'_>, comm: u64) -> PyResult<()> {
        with(py, comm, |member| match member.comm.failure() {
            Some(failure) => Err(failure.into()),
            None => Ok(()),
        })
    }

    /// Returns when every rank has come here.
    #[pyfunction]
    fn barrier(py: Python<'_>, comm: u64) -> PyResult<()> {
        with(py, comm, |member| Ok(member.comm.barrier()?))
    }

    /// The transport and why it was chosen, in words.
    #[pyfunction]
    fn explain(py: Python<'_>, comm: u64) -> PyResult<String> {
        with(py, comm, |member| Ok(member.comm.explain()))
    }

    /// The operand with this name.
    fn named(name: &str) -> Result<Operand, Error> {
        let known = Operand::named(name).map(|(operand, _)| operand);
        known.ok_or_else(|| Error::operand(format!("{name} is no operand")))
    }

    fn element(name: &str) -> Result<ElementType, Error> {
        if name == "float32" { Ok(ElementType::F32) } else { dtype(name).map(Into::into) }
    }

    fn dtype(name: &str) -> Result<DType, Error> {
        match name {
            "bfloat16" => Ok(DType::Bf16),
            "float16" => Ok(DType::F16),
            "float8_e4m3fn" => Ok(DType::E4m3),
            _ => Err(Error::operand(format!(
                "dtype {name} is neither bfloat16 nor float16: convert it"
            ))),
        }
    }

    /// Builds an op, and has it ready for calls with these numbers of rows. The extents are `n` of
    /// each weight, and `k`.
    #[pyfunction]
    fn prepare(
        py: Python<'_>,
        comm: u64,
        kind: &str,
        extents: (Vec<usize>, usize),
        of: Built,
        rows: Vec<usize>,
    ) -> PyResult<()> {
        with(py, comm, |member| {
            let (columns, k) = extents;
            let (n, columns) =
                (total(columns.iter().copied()), (columns.len() > 1).then_some(columns));
            let ((operand, output, form), transposed, names, number, norm, f32_partials) = of;
            let numerics = numerics(dtype(&operand)?, scales(form)?, dtype(&output)?);
            let activation = activation(number)?;
            let weights = if transposed { WeightLayout::Kn } else { WeightLayout::Nk };
            let mut spec = member.ops.plain(
                Kind::named(kind)?,
                n,
                k,
                numerics.with_partials(partials(f32_partials)),
            );
            spec.columns = columns;
            spec.weights = weights;
            let NamedActivation { activation, gates, .. } = activation;
            let rms_norm = norm
                .map(|(eps, form)| {
                    Ok::<_, Error>(NormSpec { eps: epsilon(eps), scales: scales(form)? })
                })
                .transpose()?;
            let operands = names.iter().map(|name| named(name)).collect::<Result<_, Error>>()?;
            spec.epilogue = EpilogueSpec { operands, activation, gates, rms_norm };
            Ok(member.ops.op(&spec, None, Stream::Host)?.prepare(&rows)?)
        })
    }

    /// Modelled time in ns of an op's call. The extents are `m`, `n` and `k` of all ranks; of a
    /// gathering op with `alone` those of this rank's GEMM.
    #[pyfunction]
    fn modelled_ns(
        py: Python<'_>,
        comm: u64,
        kind: &str,
        extents: (usize, usize, usize),
        operand: &str,
        alone: bool,
    ) -> PyResult<f64> {
        with(py, comm, |member| {
            let (op, (m, n, k)) = (Kind::named(kind)?.op(), extents);
            let world = if alone { WorldSize::ONE } else { member.comm.world_size() };
            let problem = Problem::new(op, m, n, k, dtype(operand)?, world)
                .map_err(|error| Error::operand(error.to_string()))?;
            Ok(flux_ops::modelled_ns(&member.comm, &problem))
        })
    }

    const fn partials(f32: bool) -> Partials {
        if f32 { Partials::F32 } else { Partials::Output }
    }

    fn described(name: &str, of: &Described) -> Result<(u64, ElementType, Dims), Error> {
        let (address, type_name, dim, rows, cols, strides) = of;
        let dtype = element(type_name)
            .map_err(|error| Error::operand(format!("{name}: {}", error.message())))?;
        let strides = [strides.0, strides.1];
        let dims = Dims { dim: *dim, rows: *rows, cols: *cols, strides, library: Library::NumPy };
        Ok((*address, dtype, dims))
    }

    /// Makes a call with operands in host memory, which must live and not be accessed otherwise
    /// until it returns. `numbers` are the activation's and `m`. With `eps` there is a gain.
    #[pyfunction]
    fn call_host(
        py: Python<'_>,
        comm: u64,
        kind: &str,
        numbers: (u64, usize),
        operands: Operands,
        eps: Option<f64>,
        f32_partials: bool,
    ) -> PyResult<()> {
        with(py, comm, |member| {
            let (kind, (activation_number, m)) = (Kind::named(kind)?, numbers);
            let (x, given, others) = &operands;
            let refused = |error: Error| Error::operand(format!("x: {}", error.message()));
            let dtype = dtype(&x.1).map_err(refused)?;
            let count = given.len();
            let raw = |kind: Operand, index, of: &Described| {
                let name = operand::name(kind, index, count);
                let (address, dtype, dims) = described(name, of)?;
                operand(kind, name, address, dtype, Location::Host, &dims)
            };
            let mut all = flux_ops::Operands::new(raw(Operand::X, 0, x)?);
            let mut weights = Vec::new();
            for (index, (of, out, split)) in given.iter().enumerate() {
                let name = operand::name(Operand::W, index, count);
                let (address, dtype, dims) = described(name, of)?;
                let weight = weight(name, address, dtype, Location::Host, &dims)?;
                all.add_weight(weight.stored, raw(Operand::Y, index, out)?);
                weights.push(CallWeight { weight, split: *split });
            }
            for (name, list) in others {
                let kind = named(name)?;
                for (index, of) in list.iter().enumerate() {
                    all.set(kind, index, raw(kind, index, of)?);
                }
            }
            let call = Call {
                kind,
                activation: activation(activation_number)?,
                m,
                operands: all,
                numerics: Numerics::from(dtype).with_partials(partials(f32_partials)),
                weights: &weights,
                norm: eps.map(|eps| NormSpec { eps: epsilon(eps), scales: Scales::None }),
                stream: Stream::Host,
            };
            // SAFETY: `flux_tp` holds the arrays while it calls this, and host calls end before
            // they return.
            unsafe { member.ops.call(&call) }
        })
    }

    /// The operands that calls may bring beside `x` and weights, in the order of the kernels'
    /// arguments: name, whether each weight has one, and whether it has the result's shape.
    #[pyfunction]
    fn further_inputs() -> Vec<(&'static str, bool, bool)> {
        let told = |operand: Operand| {
            (operand.name(0), operand.is_of_weight(), operand.extent() == Extent::Result)
        };
        operand::further_inputs().map(told).collect()
    }

    /// The activations, by number: name, that without gates, and whether there are gates and each is
    /// before its up.
    #[pyfunction]
    fn activations() -> Vec<(&'static str, &'static str, bool, bool)> {
        let told = |named: NamedActivation| {
            let interleaved = named.gates == Some(GateLayout::Interleaved);
            (named.name, named.activation.name(), named.gates.is_some(), interleaved)
        };
        NamedActivation::ALL.map(told).to_vec()
    }

    /// The forms of scales, by number.
    #[pyfunction]
    fn scales_of_operands() -> Vec<&'static str> {
        Scales::ALL.map(Scales::name).to_vec()
    }

    /// Most weights of one call.
    #[pyfunction]
    const fn max_weights() -> usize {
        MAX_WEIGHTS
    }

    /// The commit of this build, which `cargo xtask` names.
    #[pyfunction]
    fn commit() -> &'static str {
        option_env!("FLUX_COMMIT").filter(|commit| !commit.is_empty()).unwrap_or("unknown")
    }

    /// Registers the ops with the torch that has loaded these libraries.
    #[pyfunction]
    fn register_torch(cpu: &str, cuda: Option<&str>) -> PyResult<()> {
        Ok(crate::torch::register(cpu, cuda)?)
    }

    /// Takes the exception behind a RuntimeError of torch's with this message, if it is one of an
    /// op.
    #[pyfunction]
    fn take_error(py: Python<'_>, message: &str) -> PyResult<Option<Py<PyAny>>> {
        crate::torch::take_error(message).map(|error| error.exception(py)).transpose()
    }
}
