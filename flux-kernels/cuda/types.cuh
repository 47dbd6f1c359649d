// Integer types of fixed width: NVRTC compiles these sources without any header but their own.

#pragma once

namespace flux {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
static_assert(sizeof(u8) == 1 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "widths");

// An opaque tensor map, encoded by the host (cuTensorMapEncodeTiled).
struct alignas(128) TensorMap {
    unsigned char opaque[128];
};

// One of two types.
template <bool First, class A, class B>
struct Either {
    using Type = A;
};

template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

}  // namespace flux
