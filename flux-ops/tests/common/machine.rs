//! What the tests run on: how many ranks there can be, and where their memory is.

use super::device::{Device, Memory};
use super::launched::launched;
use super::{OPS, SHARDED};
use cudarc::driver::{CudaStream, DeviceRepr};
use flux_core::{Nodes, OpKind, Rank, TileShape, WorldSize};
use flux_kernels::Element;
use flux_ops::{Layout, TensorElement, TensorMut, TensorRef};
use flux_transport::{Communicator, Options, Select, Stream, World};
use std::sync::{Arc, Mutex, PoisonError};

/// Where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// Threads on the host transport.
    Host,
    /// Threads with a GPU each; on a machine with one, ranks share it. This and those below may be
    /// processes of a launch instead, which share what GPUs there are.
    Gpus(u32),
    /// The same through the host, with a GPU for each rank.
    Staged(u32),
    /// The same by NCCL's messages.
    Messages(u32),
    /// Threads that take this machine for two, so many in all, with a GPU each.
    TwoNodes { ranks: u32 },
}

/// Kernels of two communicators on the same GPUs could keep each other's peers from running, so
/// their tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// One rank, in its thread.
#[derive(Debug)]
pub struct Node {
    pub comm: Communicator,
    pub rank: Rank,
    /// Limit to the workers, where ranks share a GPU.
    pub workers: Option<u32>,
    device: Device,
}

impl Machine {
    /// Of the world sizes wanted those that fit.
    pub fn worlds(self, wanted: &[u32]) -> Vec<u32> {
        let most = match self {
            Self::Host => launched().map_or(16, |launch| launch.ranks),
            Self::Gpus(1) => 4,
            Self::Gpus(count) | Self::Staged(count) | Self::Messages(count) => count,
            // This one and no other.
            Self::TwoNodes { ranks } => {
                return wanted.iter().copied().filter(|&w| w == ranks).collect();
            }
        };
        wanted.iter().copied().filter(|&w| w <= most).collect()
    }

    /// The ops that it has.
    pub fn ops(self) -> &'static [OpKind] {
        match self {
            Self::TwoNodes { .. } => &SHARDED,
            _ => &OPS,
        }
    }

    /// Tile shapes that its executor has.
    pub fn tiles(self) -> Vec<TileShape> {
        match self {
            Self::Host => vec![TileShape::new(16, 24, 16), TileShape::new(32, 16, 32)],
            _ => vec![TileShape::new(128, 128, 64), TileShape::new(128, 256, 64)],
        }
    }

    /// How the sums of `ranks` ranks are grouped.
    pub fn nodes(self, ranks: u32) -> Nodes {
        let world = WorldSize::new(ranks).unwrap();
        match self {
            Self::TwoNodes { .. } => Nodes::new(world, 2).unwrap(),
            _ => Nodes::apart(world),
        }
    }

    /// Runs `body` on `ranks` ranks, each in a thread, and returns what they return; where ranks
    /// are processes, what this one's has, if it is of the run.
    pub fn run<R: Send>(
        self,
        ranks: u32,
        options: impl Fn(&mut Options) + Sync,
        body: impl Fn(&Node) -> R + Sync,
    ) -> Vec<R> {
        let results: Vec<_> = (0..ranks).map(|_| Mutex::new(None)).collect();
        self.run_ranks(ranks, &options, &|node| {
            let result = body(node);
            *results[node.rank.get() as usize].lock().unwrap() = Some(result);
        });
        results.into_iter().filter_map(|result| result.into_inner().unwrap()).collect()
    }

    /// Runs `body` on each rank. Not generic, so that it is compiled once.
    fn run_ranks(
        self,
        ranks: u32,
        options: &(dyn Fn(&mut Options) + Sync),
        body: &(dyn Fn(&Node) + Sync),
    ) {
        if let Some(launch) = launched() {
            let adjust = |adjusted: &mut Options| {
                if self != Self::Host {
                    launch.place(adjusted);
                }
                options(adjusted);
            };
            launch.run(ranks, |world| body(&self.node(world, ranks, &adjust)));
            return;
        }
        let _turn =
            (self != Self::Host).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        let worlds = World::local(ranks).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = worlds
                .into_iter()
                .map(|world| scope.spawn(move || body(&self.node(&world, ranks, options))))
                .collect();
            for thread in threads {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        });
    }

    fn node(self, world: &World, ranks: u32, adjust: &dyn Fn(&mut Options)) -> Node {
        let mut options = match self {
            Self::Host => Options { select: Select::Host, ..Options::default() },
            Self::Gpus(_) => Options { select: Select::NvLink, ..Options::default() },
            Self::Staged(_) => Options { select: Select::Pcie, ..Options::default() },
            Self::Messages(_) => Options { select: Select::Nccl, ..Options::default() },
            Self::TwoNodes { .. } => {
                Options { select: Select::Mixed, nodes: Some(2), ..Options::default() }
            }
        };
        let mut workers = None;
        if self == Self::Gpus(1) && ranks > 1 {
            (options.shared_device, options.device) = (true, Some(0));
            // All ranks' kernels must be resident at once.
            workers = Some(96 / ranks);
        }
        adjust(&mut options);
        let comm = Communicator::connect_blocking(world, options).unwrap();
        let device = Device::of(&comm).unwrap();
        Node { rank: comm.rank(), comm, workers, device }
    }
}

impl Node {
    /// The stream that the calls go to.
    pub fn stream(&self) -> Stream<'_> {
        self.device.stream()
    }

    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        match &self.device {
            Device::Host => None,
            Device::Cuda(stream) => Some(stream),
        }
    }

    pub(crate) fn upload<T: TensorElement + DeviceRepr>(&self, elements: &[T]) -> Memory<T> {
        self.device.put(elements.to_vec()).unwrap()
    }

    /// A buffer of NaN, so that an element that is not written shows.
    pub(crate) fn poisoned<T: Element + DeviceRepr>(&self, len: usize) -> Memory<T> {
        self.device.put(vec![T::from_f32(f32::NAN); len]).unwrap()
    }

    pub(crate) fn write<T: Element + DeviceRepr>(&self, memory: &mut Memory<T>, elements: &[T]) {
        self.device.write(memory, elements).unwrap();
    }

    /// The elements, when what is on the stream is done.
    pub(crate) fn download<T: TensorElement + DeviceRepr>(&self, memory: &Memory<T>) -> Vec<T> {
        self.device.get(memory).unwrap()
    }

    /// Address of the first element, as another framework would know it.
    pub(crate) fn address<T: Element + DeviceRepr>(&self, memory: &Memory<T>) -> u64 {
        self.device.address(memory).unwrap()
    }

    pub(crate) fn view<'a, T: TensorElement>(
        &'a self,
        memory: &'a Memory<T>,
        layout: impl Into<Layout>,
    ) -> TensorRef<'a, T> {
        self.device.view(memory, layout).unwrap()
    }

    pub(crate) fn view_mut<'a, T: TensorElement>(
        &'a self,
        memory: &'a mut Memory<T>,
        layout: impl Into<Layout>,
    ) -> TensorMut<'a, T> {
        self.device.view_mut(memory, layout).unwrap()
    }
}
