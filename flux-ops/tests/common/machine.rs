//! What the tests run on: how many ranks there can be, and where their memory is.

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use flux_core::{Rank, TileShape};
use flux_kernels::Element;
use flux_ops::{Layout, TensorMut, TensorRef};
use flux_transport::{Communicator, Options, Select, Stream, World};
use std::sync::{Arc, Mutex, PoisonError};

/// Where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// Threads on the host transport.
    Host,
    /// Threads with a GPU each; on a machine with one, ranks share it.
    Gpus(u32),
}

/// Kernels of two communicators on the same GPUs could keep each other's peers from running, so their tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// One rank, in its thread.
#[derive(Debug)]
pub struct Node {
    pub comm: Communicator,
    pub rank: Rank,
    /// Limit to the workers, where ranks share a GPU.
    pub workers: Option<u32>,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Host,
    Cuda(Arc<CudaStream>),
}

/// Memory of a rank's device.
#[derive(Debug)]
pub enum Buffer<T> {
    Host(Vec<T>),
    Cuda(CudaSlice<T>),
}

impl Machine {
    /// Of the world sizes wanted those that fit.
    pub fn worlds(self, wanted: &[u32]) -> Vec<u32> {
        let most = match self {
            Self::Host => 16,
            Self::Gpus(1) => 4,
            Self::Gpus(count) => count,
        };
        wanted.iter().copied().filter(|&w| w <= most).collect()
    }

    /// Tile shapes that its executor has.
    pub fn tiles(self) -> Vec<TileShape> {
        match self {
            Self::Host => vec![TileShape::new(16, 24, 16), TileShape::new(32, 16, 32)],
            Self::Gpus(_) => vec![TileShape::new(128, 128, 64), TileShape::new(128, 256, 64)],
        }
    }

    /// Runs `body` on `ranks` ranks, each in a thread, and returns what they return.
    pub fn run<R: Send>(self, ranks: u32, options: impl Fn(&mut Options) + Sync, body: impl Fn(&Node) -> R + Sync) -> Vec<R> {
        let _turn = (self != Self::Host).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        let worlds = World::local(ranks).unwrap();
        std::thread::scope(|scope| {
            let (options, body) = (&options, &body);
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || body(&self.node(&world, ranks, options)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    fn node(self, world: &World, ranks: u32, adjust: impl Fn(&mut Options)) -> Node {
        let mut options = match self {
            Self::Host => Options { select: Select::Host, ..Options::default() },
            Self::Gpus(_) => Options { select: Select::NvLink, ..Options::default() },
        };
        let mut workers = None;
        if self == Self::Gpus(1) && ranks > 1 {
            (options.shared_device, options.device) = (true, Some(0));
            // All ranks' kernels must be resident at once.
            workers = Some(96 / ranks);
        }
        adjust(&mut options);
        let comm = Communicator::connect_blocking(world, options).unwrap();
        let memory = match comm.device().ordinal() {
            None => Memory::Host,
            Some(ordinal) => Memory::Cuda(CudaContext::new(ordinal as usize).unwrap().new_stream().unwrap()),
        };
        Node { rank: comm.rank(), comm, workers, memory }
    }
}

impl Node {
    /// The stream that the calls go to.
    pub fn stream(&self) -> Stream {
        match &self.memory {
            Memory::Host => Stream::Host,
            Memory::Cuda(stream) => Stream::from(&**stream),
        }
    }

    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        match &self.memory {
            Memory::Host => None,
            Memory::Cuda(stream) => Some(stream),
        }
    }

    pub fn upload<T: Element + cudarc::driver::DeviceRepr>(&self, elements: &[T]) -> Buffer<T> {
        match &self.memory {
            Memory::Host => Buffer::Host(elements.to_vec()),
            Memory::Cuda(stream) => Buffer::Cuda(stream.clone_htod(elements).unwrap()),
        }
    }

    /// A buffer of NaN, so that an element that is not written shows.
    pub fn poisoned<T: Element + cudarc::driver::DeviceRepr>(&self, len: usize) -> Buffer<T> {
        self.upload(&vec![T::from_f32(f32::NAN); len])
    }

    pub fn write<T: Element + cudarc::driver::DeviceRepr>(&self, buffer: &mut Buffer<T>, elements: &[T]) {
        match (buffer, &self.memory) {
            (Buffer::Host(to), _) => to.copy_from_slice(elements),
            (Buffer::Cuda(to), Memory::Cuda(stream)) => stream.memcpy_htod(elements, to).unwrap(),
            _ => unreachable!("device memory of a host rank"),
        }
    }

    /// The elements, when what is on the stream is done.
    pub fn download<T: Element + cudarc::driver::DeviceRepr>(&self, buffer: &Buffer<T>) -> Vec<T> {
        match (buffer, &self.memory) {
            (Buffer::Host(from), _) => from.clone(),
            (Buffer::Cuda(from), Memory::Cuda(stream)) => stream.clone_dtoh(from).unwrap(),
            _ => unreachable!("device memory of a host rank"),
        }
    }

    /// Address of the first element, as another framework would know it.
    pub fn address<T>(&self, buffer: &Buffer<T>) -> u64 {
        match (buffer, &self.memory) {
            (Buffer::Host(memory), _) => memory.as_ptr().expose_provenance() as u64,
            (Buffer::Cuda(memory), Memory::Cuda(stream)) => memory.device_ptr(stream).0,
            _ => unreachable!("device memory of a host rank"),
        }
    }

    pub fn view<'a, T: Element>(&'a self, buffer: &'a Buffer<T>, layout: impl Into<Layout>) -> TensorRef<'a, T> {
        match (buffer, &self.memory) {
            (Buffer::Host(memory), _) => TensorRef::host(memory, layout),
            (Buffer::Cuda(memory), Memory::Cuda(stream)) => TensorRef::cuda(memory, layout, stream),
            _ => unreachable!("device memory of a host rank"),
        }
        .unwrap()
    }

    pub fn view_mut<'a, T: Element>(&'a self, buffer: &'a mut Buffer<T>, layout: impl Into<Layout>) -> TensorMut<'a, T> {
        match (buffer, &self.memory) {
            (Buffer::Host(memory), _) => TensorMut::host(memory, layout),
            (Buffer::Cuda(memory), Memory::Cuda(stream)) => TensorMut::cuda(memory, layout, stream),
            _ => unreachable!("device memory of a host rank"),
        }
        .unwrap()
    }
}
