// SPDX-License-Identifier: Apache-2.0

//go:build moec_purego || !cgo

package moec_test

import (
	"math"
	"os"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"moec.dev/moec"
	"moec.dev/moec/raw"
)

// Ranks as goroutines, each with a context of its own, that write to each other's memory (EpPeer):
// on a CPU, and on a GPU for each rank. Each rank sends its rows on as they came, so that y is x
// times the number of ranks that have an expert of the token. Shown to fail: a guest's row that is
// not sent on.

const (
	peerHidden, peerTokens, peerTopK = 8, 6, 2
	peerExperts                      = 2 // of a rank
)

// board is where ranks tell each other what they send.
type board struct {
	sent    []uintptr
	mutex   sync.Mutex
	all     *sync.Cond
	waiting int
	round   int
}

func newBoard(size int) *board {
	b := &board{sent: make([]uintptr, size)}
	b.all = sync.NewCond(&b.mutex)
	return b
}

func (b *board) meet() {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	round := b.round
	if b.waiting++; b.waiting == len(b.sent) {
		b.waiting = 0
		b.round++
		b.all.Broadcast()
	}
	for round == b.round {
		b.all.Wait()
	}
}

func bytesAt(address uintptr, count int) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), count)
}

// exchange copies `count` bytes of what each rank sends: all of it, or entry [rank].
func (b *board) exchange(rank int, send, recv uintptr, count int, all bool) {
	b.sent[rank] = send
	b.meet()
	for r, from := range b.sent {
		if !all {
			from += uintptr(rank * count)
		}
		copy(bytesAt(recv+uintptr(r*count), count), bytesAt(from, count))
	}
	b.meet()
}

// seats are the ranks that callbacks are given the numbers of.
var seats = struct {
	sync.Mutex
	all []seat
}{}

type seat struct {
	board *board
	rank  int
}

func (s seat) number() uintptr {
	seats.Lock()
	defer seats.Unlock()
	seats.all = append(seats.all, s)
	return uintptr(len(seats.all) - 1)
}

func callback(all bool) uintptr {
	return purego.NewCallback(func(user, send, recv uintptr, bytes uint64, _ uintptr) uintptr {
		seats.Lock()
		s := seats.all[user]
		seats.Unlock()
		s.board.exchange(s.rank, send, recv, int(bytes), all)
		return 0
	})
}

var collectives = sync.OnceValue(func() [2]uintptr {
	return [2]uintptr{callback(true), callback(false)}
})

// must ends the program where a rank fails: the others wait for it.
func must(status int32, what string) {
	if status != 0 {
		var last raw.ErrorInfo
		last.StructSize = uint32(unsafe.Sizeof(last))
		raw.LastError(unsafe.Pointer(&last))
		println(what, status, string(last.Message[:]))
		os.Exit(1)
	}
}

type peer struct {
	context  uintptr
	deviceId int32
	kind     int32
}

// array is memory of the library's [T,columns], whose elements have four bytes.
type array struct {
	tensor raw.Tensor
	buffer raw.Buffer
}

func (p *peer) array(dtype uint32, columns int) *array {
	made := new(array)
	must(raw.BufferAlloc(p.context, uint64(4*peerTokens*columns), unsafe.Pointer(&made.buffer)),
		"moec_buffer_alloc")
	shape := []int64{peerTokens, int64(columns)}
	must(raw.TensorMake(unsafe.Pointer(&made.tensor), made.buffer.Ptr, dtype, p.kind, p.deviceId, 2,
		unsafe.Pointer(&shape[0])), "moec_tensor_make")
	return made
}

// hostTensor is a tensor of the host with the shape of another.
func hostTensor(like *raw.Tensor, data unsafe.Pointer) *raw.Tensor {
	made := *like
	made.Data, made.DeviceType, made.DeviceId = uintptr(data), raw.Cpu, 0
	return &made
}

func (p *peer) copy(from, to *raw.Tensor) {
	must(raw.TensorCopy(p.context, unsafe.Pointer(from), unsafe.Pointer(to), 0), "moec_tensor_copy")
}

func (p *peer) sync() { must(raw.ContextSync(p.context, 0), "moec_context_sync") }

func (p *peer) run(t *testing.T, b *board, rank int) {
	runtime.LockOSThread() // errors belong to the thread
	defer runtime.UnlockOSThread()
	size := len(b.sent)
	desc := raw.ContextDesc{DeviceType: p.kind, DeviceId: p.deviceId}
	desc.StructSize = uint32(unsafe.Sizeof(desc))
	must(raw.ContextCreate(unsafe.Pointer(&desc), unsafe.Pointer(&p.context)), "moec_context_create")
	commDesc := raw.CommDesc{Rank: int32(rank), Size: int32(size)}
	commDesc.StructSize = uint32(unsafe.Sizeof(commDesc))
	callbacks := raw.CommCallbacks{User: seat{b, rank}.number(), AllGather: collectives()[0],
		AllToAll: collectives()[1]}
	callbacks.StructSize = uint32(unsafe.Sizeof(callbacks))
	var comm, ep uintptr
	must(raw.CommCreate(p.context, unsafe.Pointer(&commDesc), unsafe.Pointer(&callbacks),
		unsafe.Pointer(&comm)), "moec_comm_create")
	experts := size * peerExperts
	epDesc := raw.EpDesc{Hidden: peerHidden, MaxTokens: peerTokens, NumExperts: int32(experts),
		TopK: peerTopK, Scheme: raw.EpPeer, Dtype: raw.F32, TimeoutMs: 20000}
	epDesc.StructSize = uint32(unsafe.Sizeof(epDesc))
	must(raw.EpCreate(comm, unsafe.Pointer(&epDesc), unsafe.Pointer(&ep)), "moec_ep_create")
	// Before any kernel waits for another rank.
	rows, chosen := p.array(raw.F32, peerHidden), p.array(raw.I32, peerTopK)
	home := p.array(raw.F32, peerHidden)
	b.meet()
	args := raw.EpArgs{X: rows.tensor, ExpertIds: chosen.tensor, Y: home.tensor}
	args.StructSize = uint32(unsafe.Sizeof(args))
	for call := 0; call < 5; call++ {
		p.trip(t, ep, &args, rank, call, experts)
	}
	for _, one := range []*array{rows, chosen, home} {
		must(raw.BufferFree(p.context, unsafe.Pointer(&one.buffer)), "moec_buffer_free")
	}
	raw.EpFree(ep)
	raw.CommFree(comm)
	b.meet() // peers reach this context's memory
	raw.ContextFree(p.context)
}

func (p *peer) trip(t *testing.T, ep uintptr, args *raw.EpArgs, rank, call, experts int) {
	x := make([]float32, peerTokens*peerHidden)
	for i := range x {
		x[i] = float32(100*rank + 7*call + i)
	}
	var ids []int32
	for token := 0; token < peerTokens; token++ {
		ids = append(ids, int32((token+call)%experts), int32((3*token+rank)%experts))
	}
	y := make([]float32, len(x))
	for i := range y {
		y[i] = float32(math.NaN())
	}
	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&x[0])
	pinner.Pin(&ids[0])
	pinner.Pin(&y[0])
	p.copy(hostTensor(&args.X, unsafe.Pointer(&x[0])), &args.X)
	p.copy(hostTensor(&args.ExpertIds, unsafe.Pointer(&ids[0])), &args.ExpertIds)
	p.copy(hostTensor(&args.Y, unsafe.Pointer(&y[0])), &args.Y)
	p.sync()
	must(raw.EpDispatch(ep, unsafe.Pointer(args), 0), "moec_ep_dispatch")
	p.copy(&args.Guests, &args.Partial)
	must(raw.EpCombine(ep, unsafe.Pointer(args), 0), "moec_ep_combine")
	p.copy(&args.Y, hostTensor(&args.Y, unsafe.Pointer(&y[0])))
	p.sync()
	for i, got := range y {
		token := i / peerHidden
		times := float32(2)
		if ids[2*token]/peerExperts == ids[2*token+1]/peerExperts {
			times = 1
		}
		if got != times*x[i] {
			t.Errorf("call %d, rank %d, value %d: %v; want %v", call, rank, i, got, times*x[i])
		}
	}
}

// runPeers runs a rank for each device.
func runPeers(t *testing.T, peers []peer) {
	b := newBoard(len(peers))
	var all sync.WaitGroup
	for rank := range peers {
		all.Add(1)
		go func(rank int) {
			defer all.Done()
			peers[rank].run(t, b, rank)
		}(rank)
	}
	all.Wait()
}

func TestPeersOnACpu(t *testing.T) {
	if _, err := moec.DeviceCount(raw.Cpu); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{1, 2, 4} {
		peers := make([]peer, size)
		for rank := range peers {
			peers[rank].kind = raw.Cpu
		}
		runPeers(t, peers)
	}
}

func TestPeersOnDevices(t *testing.T) {
	count, err := moec.DeviceCount(raw.Cuda)
	if err != nil || count < 2 {
		t.Skip("peers that wait for each other want a GPU each; here: ", count, err)
	}
	var peers []peer
	for id := 0; id < count; id++ {
		peers = append(peers, peer{deviceId: int32(id), kind: raw.Cuda})
	}
	runPeers(t, peers)
}
