//! Every malformed view is refused, with the value and the limit in the text.

use super::layout::MAX_SPAN_BYTES;
use super::*;
use flux_core::DType;
use flux_kernels::F8E4M3;
use half::{bf16, f16};

/// 16-byte aligned room for `len` elements, as any allocator gives for blocks of this size.
fn memory(len: usize) -> Vec<bf16> {
    vec![bf16::ZERO; len]
}

#[test]
fn well_formed_views_report_their_layout() {
    let mut m = memory(4 * 72);
    let x = TensorRef::host(&m, Layout::strided(4, 64, 72)).unwrap();
    assert_eq!((x.layout(), x.location()), (Layout::strided(4, 64, 72), Location::Host));
    assert_eq!(x.view().bytes().end - x.view().address, (3 * 72 + 64) * 2);
    drop(x);
    let y = TensorMut::host(&mut m, (4, 72)).unwrap();
    assert_eq!(y.layout(), Layout::dense(4, 72));
}

#[test]
fn the_last_row_needs_no_padding_behind_it() {
    let m = memory(3 * 72 + 64);
    assert!(TensorRef::host(&m, Layout::strided(4, 64, 72)).is_ok());
    let one_less = TensorRef::host(&m[..3 * 72 + 63], Layout::strided(4, 64, 72)).unwrap_err();
    assert_eq!(
        one_less,
        TensorError::TooShort { layout: Layout::strided(4, 64, 72), needed: 280, available: 279 }
    );
}

#[test]
fn malformed_views_are_refused_with_value_and_limit() {
    let m = memory(64 * 64);
    let table = [
        (Layout::dense(64, 0), "cols = 0"),
        (Layout::strided(8, 64, 56), "row stride 56 is below the 64 columns"),
        (Layout::dense(64, 1), "a bias is one row, use (64,)"),
        (Layout::strided(8, 60, 60), "row stride 60 is not a multiple of 8"),
        (Layout::dense(65, 64), "needs 4160 elements, but the memory behind it has 4096"),
        (Layout::strided(usize::MAX, 64, 64), "limit of 549755813888 elements"),
        (Layout::strided(2, 64, usize::MAX - 7), "limit of 549755813888 elements"),
    ];
    for (layout, text) in table {
        let error = TensorRef::host(&m, layout).unwrap_err().to_string();
        assert!(error.contains(text), "{layout}: {error}");
    }
}

/// Of memory that may not exist.
#[test]
fn views_without_rows_are_of_any_memory() {
    assert!(TensorRef::<bf16>::host(&[], (0, 64)).is_ok());
    let raw = RawTensor {
        address: 0,
        dtype: DType::Bf16.into(),
        location: Location::Cuda(0),
        layout: Layout::dense(0, 64),
        available: 0,
    };
    // SAFETY: nothing is read.
    assert!(unsafe { TensorRef::<bf16>::from_raw(raw) }.is_ok());
}

#[test]
fn a_layout_spans_less_than_can_be_addressed() {
    let limit = MAX_SPAN_BYTES / DType::Bf16.bytes();
    let check = |rows| Layout::dense(rows, 64).check(DType::Bf16.into(), 16, usize::MAX);
    assert_eq!(check(limit / 64 - 1), Ok(()));
    let error = check(limit / 64).unwrap_err();
    assert_eq!(
        error.to_string(),
        "8589934592 rows of stride 64 are not below the limit of 549755813888 elements"
    );
}

#[test]
fn a_misaligned_view_is_refused_and_names_its_address() {
    let mut m = memory(256);
    let odd = &mut m[1..];
    let address = odd.as_ptr().addr() as u64;
    assert_eq!(
        TensorRef::host(odd, (2, 64)).unwrap_err(),
        TensorError::Misaligned { address, alignment: 16 }
    );
    assert_eq!(
        TensorMut::host(odd, (2, 64)).unwrap_err(),
        TensorError::Misaligned { address, alignment: 16 }
    );
}

#[test]
fn raw_memory_is_checked_against_its_own_description() {
    let m = memory(256);
    let raw = RawTensor {
        address: m.as_ptr().addr() as u64,
        dtype: DType::Bf16.into(),
        location: Location::Host,
        layout: Layout::dense(4, 64),
        available: 256,
    };
    // SAFETY: `raw` describes `m`, which outlives every view here; views of other addresses are not
    // used.
    let view = |raw| unsafe { TensorRef::<bf16>::from_raw(raw) };
    assert!(view(raw).is_ok());
    assert_eq!(view(RawTensor { address: 0, ..raw }).unwrap_err(), TensorError::Null);
    assert!(matches!(
        view(RawTensor { available: 255, ..raw }).unwrap_err(),
        TensorError::TooShort { needed: 256, available: 255, .. }
    ));
    let last = u64::MAX - 15;
    assert_eq!(
        view(RawTensor { address: last, ..raw }).unwrap_err(),
        TensorError::BeyondAddresses { address: last, bytes: 512 }
    );
    assert_eq!(view(RawTensor { address: last - 512, ..raw }).unwrap().view().bytes().end, last);
    // SAFETY: it is refused for its element type, and nothing is read.
    let other = unsafe { TensorRef::<f16>::from_raw(raw) }.unwrap_err();
    assert_eq!(
        other,
        TensorError::DType { expected: DType::F16.into(), found: DType::Bf16.into() }
    );
    assert_eq!(
        view(RawTensor { dtype: DType::F16.into(), ..raw }).unwrap_err().to_string(),
        "the memory holds fp16, the view is of bf16: convert it, or use the op of that element type"
    );
}

proptest::proptest! {
    /// Accepted is exactly what can be addressed: whole 16-byte rows apart, the last element inside
    /// the memory.
    #[test]
    fn a_layout_is_accepted_if_and_only_if_the_memory_holds_it(
        rows in 0usize..9, cols in 0usize..80, row_stride in 0usize..100, len in 0usize..800, offset in 0usize..17,
    ) {
        let m = memory(len + 32);
        let part = &m[offset..offset + len];
        // A view without rows has no memory.
        let fits = cols > 0 && (rows == 0 || (rows - 1) * row_stride + cols <= len);
        let vector = DType::Bf16.per_vector() as usize;
        let aligned = (rows == 0 || offset.is_multiple_of(vector)) && row_stride.is_multiple_of(vector);
        let accepted = TensorRef::host(part, Layout::strided(rows, cols, row_stride)).is_ok();
        proptest::prop_assert_eq!(accepted, fits && aligned && row_stride >= cols);
    }
}

#[test]
fn rows_without_room_for_what_is_behind_codes_are_refused() {
    let memory = [0_u128; 3 * 8];
    let codes: &[F8E4M3] = bytemuck::cast_slice(&memory);
    for (k, scales, least) in
        [(64, Scales::Row, 128), (128, Scales::Row, 256), (128, Scales::Block, 256)]
    {
        let view = |cols| TensorRef::host(codes, (1, cols)).unwrap();
        let error = view(least - 16).with_scales(k, scales);
        assert!(matches!(error, Err(TensorError::NoScales { .. })), "{scales}: {error:?}");
        view(least).with_scales(k, scales).unwrap();
    }
    assert!(TensorRef::host(codes, (1, 128)).unwrap().with_scales(64, Scales::Tensor).is_err());
}
