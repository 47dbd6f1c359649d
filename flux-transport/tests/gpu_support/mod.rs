//! What the tests on devices share: whether to run, and raw reads and writes of device memory.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test")]

pub(crate) mod memory;
pub(crate) mod processes;
pub(crate) mod push;
#[path = "../../../flux-kernels/tests/skipped/mod.rs"]
mod skipped;

pub(crate) use skipped::skip;

use cudarc::driver::{result, sys};
use flux_core::layout::control;
use flux_cuda::{CudaDevice, SideStream};
use flux_transport::{Communicator, Options, Select, Stream, WorkspaceView, World};

/// Devices that this process sees, or a printed line and `None` where the test cannot run.
pub(crate) fn devices(test: &str, needed: u32) -> Option<u32> {
    let why = match flux_cuda::available().map(|()| flux_cuda::device_count().unwrap_or(0)) {
        Ok(count) if count >= needed => return Some(count),
        Ok(count) => format!("{needed} devices needed, {count} here"),
        Err(why) => why.to_string(),
    };
    skip(test, &why);
    None
}

/// The devices that have peer access with device 0 and with each other, counted from 0.
pub(crate) fn linked_devices(test: &str, needed: u32) -> Option<u32> {
    let count = devices(test, needed)?;
    let matrix = flux_cuda::peer_matrix().expect("peer matrix");
    let linked = (1..=count)
        .rev()
        .find(|&n| matrix[..n as usize].iter().all(|row| row[..n as usize].iter().all(|&can| can)));
    let linked = linked.unwrap_or(1);
    if linked < needed {
        skip(
            test,
            &format!("{needed} devices with peer access to each other needed, {linked} here"),
        );
        return None;
    }
    Some(linked)
}

/// Device memory of a test, freed with it.
pub(crate) struct Buffer {
    device: CudaDevice,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Buffer {
    pub(crate) fn new(device: &CudaDevice, bytes: usize) -> Self {
        device.bind().expect("bind");
        // SAFETY: a context is current.
        let address = unsafe { result::malloc_sync(bytes) }.expect("device memory");
        Self { device: device.clone(), address, bytes }
    }

    pub(crate) fn from_words(device: &CudaDevice, words: &[u32]) -> Self {
        let buffer = Self::new(device, words.len() * 4);
        write_words(device, buffer.address, words);
        buffer
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Writes words to device memory and waits until they are there.
pub(crate) fn write_words(device: &CudaDevice, address: u64, words: &[u32]) {
    device.bind().expect("bind");
    // SAFETY: the tests pass addresses of memory of at least this length.
    unsafe { result::memcpy_htod_sync(address, words) }.expect("write");
    device.synchronize().expect("synchronize");
}

/// Reads words of device memory, after everything on the device.
pub(crate) fn read_words(device: &CudaDevice, address: u64, count: usize) -> Vec<u32> {
    device.synchronize().expect("synchronize");
    device.bind().expect("bind");
    let mut words = vec![0_u32; count];
    // SAFETY: the tests pass addresses of memory of at least this length.
    unsafe { result::memcpy_dtoh_sync(&mut words, address) }.expect("read");
    words
}

/// Copies device memory by the device's own engines and waits.
pub(crate) fn copy(device: &CudaDevice, to: u64, from: u64, bytes: usize) {
    device.bind().expect("bind");
    // SAFETY: the tests pass addresses of memory of at least this length.
    unsafe { sys::cuMemcpyDtoD_v2(to, from, bytes) }.result().expect("copy");
    device.synchronize().expect("synchronize");
}

/// Words that differ by rank and position.
pub(crate) fn pattern(seed: u32, count: usize) -> Vec<u32> {
    (0..count)
        .map(|i| (seed << 24) ^ u32::try_from(i).expect("small").wrapping_mul(0x9e37_79b1))
        .collect()
}

/// Runs `body(rank)` on a thread for each rank and returns the results.
pub(crate) fn on_threads<R: Send>(world: u32, body: impl Fn(u32) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// One rank of a test: its communicator, device and a stream.
pub(crate) struct RankUnderTest {
    pub(crate) comm: Communicator,
    pub(crate) stream: SideStream,
    pub(crate) device: CudaDevice,
}

impl RankUnderTest {
    pub(crate) fn connect(world: &World, options: Options) -> Self {
        let comm = Communicator::connect_blocking(world, options).expect("connect");
        let device =
            CudaDevice::open(comm.device().ordinal().expect("a CUDA device")).expect("open");
        let stream = SideStream::new(&device).expect("stream");
        Self { comm, stream, device }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.comm.rank().get()
    }

    pub(crate) fn world(&self) -> u32 {
        self.comm.world_size().get()
    }

    /// The stream, for calls.
    pub(crate) fn stream(&self) -> Stream<'_> {
        stream_of(&self.stream)
    }

    /// The workspace, from a call that is given up.
    pub(crate) fn view(&self) -> WorkspaceView {
        self.comm.begin(self.stream()).expect("begin").memory().clone()
    }

    /// The words of the control block that the tests look at: epoch, ticket, poison, pushed.
    pub(crate) fn control(&self) -> [u32; 4] {
        let at = self.view().control;
        [control::EPOCH, control::TICKET, control::POISON, control::PUSHED]
            .map(|word| read_words(&self.device, at + word, 1)[0])
    }

    /// What a kernel does last: the call is over. The caller has synchronised.
    pub(crate) fn close_call(&self, epoch: u32) {
        write_words(&self.device, self.view().control + control::EPOCH, &[epoch.wrapping_add(1)]);
    }
}

/// A stream of a test, for calls.
pub(crate) fn stream_of(stream: &SideStream) -> Stream<'_> {
    // SAFETY: the tests keep their streams while they make calls with them.
    unsafe { Stream::from_raw(stream.raw()) }
}

/// Connects `world` threads over nvlink and runs `body` on each.
pub(crate) fn with_ranks<R: Send>(
    world: u32,
    options: Options,
    body: impl Fn(RankUnderTest) -> R + Sync,
) -> Vec<R> {
    let options = Options { select: Select::NvLink, ..options };
    let worlds = World::local(world).expect("world");
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = worlds
            .into_iter()
            .map(|world| scope.spawn(move || body(RankUnderTest::connect(&world, options))))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}
