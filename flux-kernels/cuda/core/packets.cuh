// Packets: four bytes of payload that travel with the epoch of their call (flux-core/src/layout.rs). Each is stored and loaded whole, so what is seen with this
// call's epoch is this call's, with no fence, count or signal between writer and reader. They lie on the pad, behind the signals, sixteen on a line.
#pragma once
#include "core/wait.cuh"
#include "program.cuh"
#include "ptx/memory.cuh"

namespace flux {

constexpr u32 kPackets = kLine / 8;

// Where packets `index` and the next lie on a rank's pad in this call; `index` is even, so they are on one line.
__device__ __forceinline__ u64 packet_pair(const Params& p, u32 rank, u32 epoch, u32 index) {
    return p.pad[rank] + p.packets + (static_cast<u64>(index / kPackets) * 2 + (epoch & 1)) * kLine + index % kPackets * 8;
}

__device__ __forceinline__ void store_pair(u64 at, u32 epoch, uint2 payload) {
    ptx::store_relaxed_sys_2x64(at, epoch | static_cast<u64>(payload.x) << 32, epoch | static_cast<u64>(payload.y) << 32);
}

// Two packets as they were seen.
struct PacketPair {
    u64 a, b;

    __device__ __forceinline__ static PacketPair load(u64 at) {
        PacketPair seen;
        ptx::load_relaxed_sys_2x64(at, seen.a, seen.b);
        return seen;
    }

    // The epoch of both, or an older one that one of them still has.
    __device__ __forceinline__ u32 reached(u32 epoch) const {
        return static_cast<u32>(a) == epoch ? static_cast<u32>(b) : static_cast<u32>(a);
    }

    __device__ __forceinline__ uint2 payload() const {
        return {static_cast<u32>(a >> 32), static_cast<u32>(b >> 32)};
    }
};

// Looks again until both packets are of this call; false when the wait was given up. `t` names who sends them.
__device__ __forceinline__ bool wait_pair(const Params& p, u32 epoch, u64 at, const WaitTarget& t, PacketPair& seen) {
    return seen.reached(epoch) == epoch || poll(p, epoch, t, [&] {
        seen = PacketPair::load(at);
        return seen.reached(epoch);
    });
}

}  // namespace flux
