//! NCCL's collectives over all devices, each rank a thread, against sums made on the host.

use crate::gpu_support::{Buffer, devices, on_threads, pattern, read_words, skip};
use crate::lateness::AMPLE;
use flux_core::layout::WorkspaceSize;
use flux_cuda::{CudaDevice, SideStream};
use flux_transport::internal::nccl::{self, Comm, ElementType, UniqueId};
use flux_transport::{CollectiveKind, Communicator, Options, Select, World};

#[test]
fn collectives_of_all_devices_give_the_sums_of_the_host() {
    const WORDS: usize = 1 << 12;
    let Some(world) = devices("gpu_nccl", 1) else { return };
    if let Err(why) = nccl::available() {
        skip("gpu_nccl", &why);
        return;
    }
    let id = UniqueId::new().unwrap();
    on_threads(world, |rank| {
        let device = CudaDevice::open(rank).unwrap();
        let comm = Comm::join(&device, id, rank, world, AMPLE).unwrap();
        let stream = SideStream::new(&device).unwrap();
        let blocks = world as usize;
        let input = pattern(rank + 1, WORDS * blocks);
        let from = Buffer::from_words(&device, &input);
        let gathered = Buffer::new(&device, 4 * WORDS * blocks);
        let scattered = Buffer::new(&device, 4 * WORDS);
        let reduced = Buffer::new(&device, 4 * WORDS * blocks);
        // SAFETY: the buffers have the needed sizes and outlive the reads below, which synchronise.
        unsafe {
            for (kind, to, words) in [
                (CollectiveKind::AllGather, &gathered, WORDS),
                (CollectiveKind::ReduceScatter, &scattered, WORDS),
                (CollectiveKind::AllReduce, &reduced, WORDS * blocks),
            ] {
                let ends = (from.address, to.address);
                comm.collective(kind, ends, words, ElementType::U32, stream.raw()).unwrap();
            }
        }
        stream.synchronize().unwrap();
        comm.status().unwrap();
        let all: Vec<Vec<u32>> = (0..world).map(|peer| pattern(peer + 1, WORDS * blocks)).collect();
        let sum: Vec<u32> = (0..WORDS * blocks)
            .map(|i| all.iter().fold(0_u32, |acc, words| acc.wrapping_add(words[i])))
            .collect();
        let expected: Vec<u32> = all.iter().flat_map(|words| words[..WORDS].to_vec()).collect();
        assert_eq!(read_words(&device, gathered.address, WORDS * blocks), expected);
        let own = rank as usize * WORDS;
        assert_eq!(read_words(&device, scattered.address, WORDS), sum[own..own + WORDS]);
        assert_eq!(read_words(&device, reduced.address, WORDS * blocks), sum);
    });
}

#[test]
fn a_workspace_that_is_larger_than_there_can_be_is_refused() {
    let Some(_) = devices("gpu_nccl", 1) else { return };
    if let Err(why) = nccl::available() {
        return skip("gpu_nccl", &why);
    }
    let connect = |half_bytes| {
        let reserve = WorkspaceSize { half_bytes, ..WorkspaceSize::default() };
        let options =
            Options { select: Select::Nccl, device: Some(0), reserve, ..Options::default() };
        Communicator::connect_blocking(&World::local(1).unwrap()[0], options)
    };
    // Twice that is 0 in 64 bits.
    let refused = connect(1 << 63).unwrap_err().to_string();
    assert!(refused.contains("workspace"), "{refused}");
    let comm = connect(0).unwrap();
    assert!(
        comm.reserve(WorkspaceSize { half_bytes: 1 << 63, ..WorkspaceSize::default() }).is_err()
    );
    comm.status().unwrap();
}
