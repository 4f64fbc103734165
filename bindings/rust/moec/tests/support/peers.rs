// SPDX-License-Identifier: Apache-2.0
//! Ranks as threads of one process, each with a context of its own, that write to each other's
//! memory (`MOEC_EP_PEER`): on a CPU, and on a GPU for each rank. Each rank sends its rows on as
//! they came, so that y is x times the number of ranks that have an expert of the token.
//! Shown to fail: a guest's row that is not sent on.
use moec::*;
use std::ffi::c_void;
use std::mem::{size_of, zeroed};
use std::ptr::{copy_nonoverlapping, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::Barrier;

const HIDDEN: usize = 8;
const TOKENS: usize = 6;
const TOP_K: usize = 2;
const OF_RANK: usize = 2; // experts

struct Board {
    barrier: Barrier,
    sent: Vec<AtomicUsize>, // addresses
}

struct Seat<'b> {
    board: &'b Board,
    rank: usize,
}

/// `bytes` of what each rank sends: all of it, or entry [this rank].
unsafe fn exchange(user: *mut c_void, send: *const c_void, to: *mut c_void, bytes: u64, all: bool) {
    let (seat, bytes) = (&*(user as *const Seat), bytes as usize);
    seat.board.sent[seat.rank].store(send as usize, SeqCst);
    seat.board.barrier.wait();
    for (rank, from) in seat.board.sent.iter().enumerate() {
        let from = from.load(SeqCst) + if all { 0 } else { seat.rank * bytes };
        copy_nonoverlapping(from as *const u8, (to as *mut u8).add(rank * bytes), bytes);
    }
    seat.board.barrier.wait();
}

unsafe extern "C" fn all_gather(
    user: *mut c_void,
    send: *const c_void,
    recv: *mut c_void,
    bytes: u64,
    _: *mut c_void,
) -> i32 {
    exchange(user, send, recv, bytes, true);
    0
}

unsafe extern "C" fn all_to_all(
    user: *mut c_void,
    send: *const c_void,
    recv: *mut c_void,
    bytes: u64,
    _: *mut c_void,
) -> i32 {
    exchange(user, send, recv, bytes, false);
    0
}

/// A rank that fails ends the program: others wait for it.
struct Together;
impl Drop for Together {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::exit(101);
        }
    }
}

/// Memory of the library's on a device.
struct Array<'c> {
    context: &'c Context,
    buffer: sys::moec_buffer,
    tensor: sys::moec_tensor,
}

unsafe fn make(
    data: *mut c_void,
    dtype: u32,
    place: (u32, i32),
    shape: &[i64],
) -> sys::moec_tensor {
    let mut tensor: sys::moec_tensor = zeroed();
    check(sys::moec_tensor_make(
        &mut tensor,
        data,
        dtype,
        place.0 as i32,
        place.1,
        shape.len() as i32,
        shape.as_ptr(),
    ))
    .unwrap();
    tensor
}

impl<'c> Array<'c> {
    /// [TOKENS, columns]; each element has four bytes.
    unsafe fn new(context: &'c Context, place: (u32, i32), dtype: u32, columns: usize) -> Self {
        let mut buffer: sys::moec_buffer = zeroed();
        let bytes = 4 * (TOKENS * columns) as u64;
        check(sys::moec_buffer_alloc(context.as_raw(), bytes, &mut buffer)).unwrap();
        let tensor = make(buffer.ptr, dtype, place, &[TOKENS as i64, columns as i64]);
        Self { context, buffer, tensor }
    }
    unsafe fn host<T>(&self, values: *const T) -> sys::moec_tensor {
        let shape = &self.tensor.shape[..2];
        make(values as *mut c_void, self.tensor.dtype, (sys::MOEC_CPU, 0), shape)
    }
    unsafe fn write<T>(&self, values: &[T]) {
        let host = self.host(values.as_ptr());
        check(sys::moec_tensor_copy(self.context.as_raw(), &host, &self.tensor, null_mut()))
            .unwrap();
        check(sys::moec_context_sync(self.context.as_raw(), null_mut())).unwrap();
    }
    unsafe fn read(&self) -> Vec<f32> {
        let mut values = vec![f32::NAN; TOKENS * HIDDEN];
        let host = self.host(values.as_mut_ptr());
        check(sys::moec_tensor_copy(self.context.as_raw(), &self.tensor, &host, null_mut()))
            .unwrap();
        check(sys::moec_context_sync(self.context.as_raw(), null_mut())).unwrap();
        values
    }
}

impl Drop for Array<'_> {
    fn drop(&mut self) {
        // SAFETY: the buffer is the context's.
        let _ = unsafe { sys::moec_buffer_free(self.context.as_raw(), &mut self.buffer) };
    }
}

fn run_rank(board: &Board, rank: usize, place: (u32, i32)) {
    let _together = Together;
    let size = board.sent.len();
    let num_experts = size * OF_RANK;
    let desc = ContextDesc::new().device_type(place.0 as i32).device_id(place.1);
    let context = Context::new(&desc).unwrap();
    let seat = Seat { board, rank };
    // SAFETY: what the library is given outlives it, and arrays have the shapes that they say.
    unsafe {
        let mut desc: sys::moec_comm_desc = zeroed();
        desc.struct_size = size_of::<sys::moec_comm_desc>() as u32;
        (desc.rank, desc.size) = (rank as i32, size as i32);
        let mut callbacks: sys::moec_comm_callbacks = zeroed();
        callbacks.struct_size = size_of::<sys::moec_comm_callbacks>() as u32;
        callbacks.user = &seat as *const Seat as *mut c_void;
        callbacks.all_gather = Some(all_gather);
        callbacks.all_to_all = Some(all_to_all);
        let mut comm = null_mut();
        check(sys::moec_comm_create(context.as_raw(), &desc, &callbacks, &mut comm)).unwrap();

        let mut desc: sys::moec_ep_desc = zeroed();
        desc.struct_size = size_of::<sys::moec_ep_desc>() as u32;
        (desc.hidden, desc.max_tokens) = (HIDDEN as i64, TOKENS as i64);
        (desc.num_experts, desc.top_k) = (num_experts as i32, TOP_K as i32);
        (desc.scheme, desc.dtype, desc.timeout_ms) = (sys::MOEC_EP_PEER, sys::MOEC_F32, 20000);
        let mut ep = null_mut();
        check(sys::moec_ep_create(comm, &desc, &mut ep)).unwrap();

        // Before any kernel waits for another rank.
        let [rows, y] = [(); 2].map(|()| Array::new(&context, place, sys::MOEC_F32, HIDDEN));
        let chosen = Array::new(&context, place, sys::MOEC_I32, TOP_K);
        board.barrier.wait();
        for call in 0..5 {
            let x: Vec<f32> =
                (0..TOKENS * HIDDEN).map(|i| (100 * rank + 7 * call + i) as f32).collect();
            let ids: Vec<i32> = (0..TOKENS)
                .flat_map(|t| [t + call, 3 * t + rank].map(|id| (id % num_experts) as i32))
                .collect();
            rows.write(&x);
            chosen.write(&ids);
            y.write(&[f32::NAN; TOKENS * HIDDEN]);
            let mut args: sys::moec_ep_args = zeroed();
            args.struct_size = size_of::<sys::moec_ep_args>() as u32;
            (args.x, args.expert_ids, args.y) = (rows.tensor, chosen.tensor, y.tensor);
            check(sys::moec_ep_dispatch(ep, &mut args, null_mut())).unwrap();
            check(sys::moec_tensor_copy(context.as_raw(), &args.guests, &args.partial, null_mut()))
                .unwrap();
            check(sys::moec_ep_combine(ep, &args, null_mut())).unwrap();
            let found = y.read();
            for (t, row) in found.chunks(HIDDEN).enumerate() {
                let owner = |k: usize| ids[TOP_K * t + k] as usize / OF_RANK;
                let times = if owner(0) == owner(1) { 1.0 } else { 2.0 };
                let want: Vec<f32> = x[HIDDEN * t..][..HIDDEN].iter().map(|v| times * v).collect();
                assert_eq!(row, want, "token {t} of rank {rank}, call {call}");
            }
        }
        sys::moec_ep_free(ep);
        sys::moec_comm_free(comm);
    }
    board.barrier.wait(); // peers reach this context's memory
}

fn run(size: usize, place: impl Fn(usize) -> (u32, i32) + Sync) {
    let sent = (0..size).map(|_| AtomicUsize::new(0)).collect();
    let board = &Board { barrier: Barrier::new(size), sent };
    let place = &place;
    std::thread::scope(|scope| {
        for rank in 0..size {
            scope.spawn(move || run_rank(board, rank, place(rank)));
        }
    });
}

#[test]
fn peers_on_a_cpu() {
    for size in [1, 2, 4] {
        run(size, |_| (sys::MOEC_CPU, 0));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn peers_on_gpus() {
    let gpus = device_count(sys::MOEC_CUDA).unwrap() as usize;
    if gpus < 2 {
        return println!(
            "left out: peers that wait for each other want a GPU each, {gpus} is here"
        );
    }
    run(gpus, |rank| (sys::MOEC_CUDA, rank as i32));
}
