// SPDX-License-Identifier: Apache-2.0
// What the friendly layer needs beside moec.h: tensors from and to Python, errors, the log.
%{
static int as_extents(PyObject *tuple, int64_t out[MOEC_MAX_DIMS]) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  if (count > MOEC_MAX_DIMS) {
    PyErr_Format(PyExc_ValueError, "%zd dimensions; at most %d", count, MOEC_MAX_DIMS);
  }
  for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); ++i) {
    out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  }
  return PyErr_Occurred() ? -1 : (int)count;
}

/* What is read of a tensor of PyTorch; interned, since a lookup by C text makes an object of it. */
static struct {
  PyObject *shape, *dtype, *device, *data_ptr;
} torch_names;

static int has_torch_names(void) {
  if (!torch_names.shape) {
    torch_names.data_ptr = PyUnicode_InternFromString("data_ptr");
    torch_names.device = PyUnicode_InternFromString("device");
    torch_names.dtype = PyUnicode_InternFromString("dtype");
    torch_names.shape = PyUnicode_InternFromString("shape");
  }
  return torch_names.data_ptr && torch_names.device && torch_names.dtype && torch_names.shape;
}

/* values[object.name] of a dict or its like, an integer. */
static unsigned long long looked_up(PyObject *values, PyObject *object, PyObject *name) {
  PyObject *key = PyObject_GetAttr(object, name);
  PyObject *found = key ? PyObject_GetItem(values, key) : NULL;
  const unsigned long long value = found ? PyLong_AsUnsignedLongLong(found) : 0;
  Py_XDECREF(found);
  Py_XDECREF(key);
  return value;
}

/* A tensor of PyTorch, which is compact. Raises on failure. */
static void put_tensor(moec_tensor *out, PyObject *value, PyObject *codes, PyObject *places) {
  int64_t shape[MOEC_MAX_DIMS] = {0};
  PyObject *own = PyObject_GetAttr(value, torch_names.shape);
  const int num_dims = own ? as_extents(own, shape) : -1;
  Py_XDECREF(own);
  if (num_dims < 0) return;
  const moec_dtype dtype = (moec_dtype)looked_up(codes, value, torch_names.dtype);
  if (PyErr_Occurred()) return;
  const unsigned long long place = looked_up(places, value, torch_names.device);
  if (PyErr_Occurred()) return;
  PyObject *address = PyObject_CallMethodObjArgs(value, torch_names.data_ptr, NULL);
  void *data = address ? PyLong_AsVoidPtr(address) : NULL;
  Py_XDECREF(address);
  if (PyErr_Occurred()) return;
  const moec_status status = moec_tensor_make(out, data, dtype, (int32_t)(place >> 32),
                                              (int32_t)(place & INT32_MAX), num_dims, shape);
  if (status < 0) raise_status(status);
}
%}
%inline %{
/* Callable (status, native_code, arg_index, name, site, message) -> exception instance. */
void set_error_factory(PyObject *callable) {
  PyObject *old = error_factory;
  error_factory = Py_NewRef(callable);
  Py_XDECREF(old);
}

/* Borrow a NumPy array through the capsule of its __array_struct__ (NumPy's array interface). */
moec_status tensor_from_numpy(moec_tensor *out, PyObject *capsule, uint32_t dtype) {
  const struct { /* PyArrayInterface */
    int two, num_dims;
    char kind;
    int item_bytes, flags;
    const Py_ssize_t *shape, *byte_strides;
    void *data;
  } *array = PyCapsule_GetPointer(capsule, NULL);
  if (!array) return MOEC_OK;
  int64_t shape[MOEC_MAX_DIMS], strides[MOEC_MAX_DIMS];
  const int is_compact = array->flags & 1; /* C contiguous */
  for (int i = 0; i < array->num_dims && i < MOEC_MAX_DIMS; ++i) {
    shape[i] = array->shape[i];
    strides[i] = array->byte_strides[i] / array->item_bytes;
    if (!is_compact && array->byte_strides[i] % array->item_bytes) {
      PyErr_Format(PyExc_BufferError, "the array has a stride of %zd bytes, its elements %d",
                   array->byte_strides[i], array->item_bytes);
      return MOEC_OK;
    }
  }
  const struct { /* DLTensor */
    void *data;
    int32_t device_type, device_id, num_dims;
    moec_dtype dtype;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
  } tensor = {.data = array->data, .device_type = MOEC_CPU, .num_dims = array->num_dims,
              .dtype = dtype, .shape = shape, .strides = is_compact ? NULL : strides};
  return moec_tensor_from_dlpack(&tensor, out);
}

/* Borrow a DLPack capsule, which is left unconsumed: whoever keeps it keeps the memory. */
moec_status tensor_from_capsule(moec_tensor *out, PyObject *capsule, int32_t writable) {
  struct versioned { /* DLManagedTensorVersioned, without the DLTensor that follows */
    uint32_t major, minor;
    void *context;
    void (*deleter)(void *);
    uint64_t flags;
  };
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    return moec_tensor_from_dlpack(PyCapsule_GetPointer(capsule, "dltensor"), out);
  }
  const struct versioned *tensor = PyCapsule_GetPointer(capsule, "dltensor_versioned");
  if (!tensor) return MOEC_OK;
  if (tensor->major != 1) {
    PyErr_Format(PyExc_BufferError, "DLPack %u; 1.x is understood", tensor->major);
  } else if (writable && (tensor->flags & 1)) {
    PyErr_SetString(PyExc_BufferError, "the array is read-only; an output must be writable");
  } else {
    return moec_tensor_from_dlpack(tensor + 1, out);
  }
  return MOEC_OK;
}

/* A compact tensor from its parts, for frameworks whose own protocol costs more than a call. */
moec_status tensor_from_parts(moec_tensor *out, void *data, uint32_t dtype, int32_t device_type,
                              int32_t device_id, PyObject *shape) {
  int64_t sizes[MOEC_MAX_DIMS] = {0};
  const Py_ssize_t num_dims = PyTuple_Size(shape);
  if (num_dims > MOEC_MAX_DIMS) {
    PyErr_Format(PyExc_ValueError, "%zd dimensions; at most %d", num_dims, MOEC_MAX_DIMS);
    return MOEC_OK;
  }
  for (Py_ssize_t i = 0; i < num_dims; ++i) {
    sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
  }
  if (PyErr_Occurred()) return MOEC_OK;
  return moec_tensor_make(out, data, dtype, device_type, device_id, (int32_t)num_dims, sizes);
}
%}

// The arguments of one call: any struct of moec.h, or topk_args.
%{
typedef struct call_args call_args;
typedef struct topk_args {
  moec_buffer memory;
  moec_tensor expert_ids, routing_weights;
} topk_args;

static void *at_place(void *base, PyObject *places, Py_ssize_t i) {
  return (char *)base + PyLong_AsSize_t(PyTuple_GetItem(places, i));
}

/* -1 with an error unless there are as many places. */
static Py_ssize_t count_of(PyObject *values, PyObject *at) {
  const Py_ssize_t count = PyTuple_Size(values), there = PyTuple_Size(at);
  if (PyErr_Occurred() || count == there) return count;
  PyErr_Format(PyExc_ValueError, "%zd values for %zd places", count, there);
  return -1;
}

static void put_values(void *base, PyObject *at, PyObject *values, PyObject *codes,
                       PyObject *places) {
  const Py_ssize_t count = count_of(values, at);
  if (!has_torch_names()) return;
  for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); ++i) {
    put_tensor(at_place(base, at, i), PyTuple_GetItem(values, i), codes, places);
  }
}

static void put_words(void *base, PyObject *at, PyObject *words) {
  const Py_ssize_t count = count_of(words, at);
  for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); ++i) {
    const uint64_t word = PyLong_AsUnsignedLongLong(PyTuple_GetItem(words, i));
    if (!PyErr_Occurred()) memcpy(at_place(base, at, i), &word, sizeof word);
  }
}
%}
struct call_args {};
%extend call_args {
  /* pattern: the struct's bytes; at offsets in it, compact tensors of PyTorch and words of 64 bits.
   * codes[dtype] is a tensor's moec_dtype, places[device] its device_type << 32 | device_id. */
  call_args(PyObject *pattern, PyObject *tensors_at, PyObject *tensors, PyObject *words_at,
            PyObject *words, PyObject *codes, PyObject *places) {
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(pattern, &bytes, &size)) return NULL;
    void *memory = malloc((size_t)size);
    if (!memory) return (call_args *)PyErr_NoMemory();
    memcpy(memory, bytes, (size_t)size);
    put_values(memory, tensors_at, tensors, codes, places);
    if (!PyErr_Occurred()) put_words(memory, words_at, words);
    if (!PyErr_Occurred()) return memory;
    free(memory);
    return NULL;
  }
  ~call_args() { free($self); }
}

%inline %{
/* (address, dtype, device_type, device_id, shape) of a tensor the library returned. */
PyObject *tensor_describe(const moec_tensor *tensor) {
  PyObject *shape = PyTuple_New(tensor->ndim);
  for (int32_t i = 0; shape && i < tensor->ndim; ++i) {
    PyTuple_SetItem(shape, i, PyLong_FromLongLong(tensor->shape[i]));
  }
  if (!shape) return NULL;
  return Py_BuildValue("(KIiiN)", (unsigned long long)(uintptr_t)tensor->data + tensor->byte_offset,
                       tensor->dtype, tensor->device_type, tensor->device_id, shape);
}
%}

%{
static PyObject *log_sink;

static void log_to_python(void *user, int32_t level, const char *message, size_t length) {
  (void)user;
  if (!Py_IsInitialized()) return; /* the interpreter is gone: the message is dropped */
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject *sink = Py_XNewRef(log_sink); /* set_log may replace it meanwhile */
  if (sink) {
    PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)length, "replace");
    PyObject *result = text ? PyObject_CallFunction(sink, "iN", level, text) : NULL;
    if (!result) PyErr_WriteUnraisable(sink);
    Py_XDECREF(result);
    Py_DECREF(sink);
  }
  PyGILState_Release(state);
}
%}

%inline %{
/* sink(level, message), called from any thread; None restores silence. */
moec_status set_log(PyObject *sink, int32_t min_level) {
  if (sink != Py_None && !PyCallable_Check(sink)) {
    PyErr_Format(PyExc_TypeError, "%R cannot be called; give sink(level, message), or None", sink);
    return MOEC_OK;
  }
  const moec_status status =
      moec_set_log(sink == Py_None ? NULL : log_to_python, NULL, min_level);
  if (status < 0) return status;
  PyObject *old = log_sink;
  log_sink = sink == Py_None ? NULL : Py_NewRef(sink);
  Py_XDECREF(old);
  return status;
}
%}

%{
/* What gcc calls for `#pragma omp parallel`; LLVM's and Intel's OpenMP have it, too. */
static struct {
  void (*parallel)(void (*body)(void *), void *arg, unsigned num_threads, unsigned flags);
  int (*thread_num)(void), (*num_threads)(void), (*max_threads)(void);
} openmp;

struct openmp_work {
  int64_t n;
  void (*body)(void *arg, int64_t i);
  void *arg;
};

static void openmp_share(void *arg) { /* one thread's part */
  const struct openmp_work *work = arg;
  const int64_t step = openmp.num_threads();
  for (int64_t i = openmp.thread_num(); i < work->n; i += step) work->body(work->arg, i);
}

/* A team of constant size: a smaller one would end the threads that it leaves out. */
static int32_t openmp_for(void *num_threads, int64_t n, void (*body)(void *arg, int64_t i),
                          void *arg) {
  struct openmp_work work = {n, body, arg};
  openmp.parallel(openmp_share, &work, (unsigned)(uintptr_t)num_threads, 0);
  return 0;
}
%}

%inline %{
/* Contexts of `desc` work on the threads of the OpenMP runtime that the process has loaded
 * (PyTorch's): 1, or 0 where there is none. num_threads 0: as many as OpenMP would take. */
int32_t use_openmp(moec_context_desc *desc, int32_t num_threads) {
  static _Thread_local moec_thread_pool pool; /* until moec_context_create has copied it */
  *(void **)&openmp.parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  *(void **)&openmp.thread_num = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
  *(void **)&openmp.num_threads = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
  *(void **)&openmp.max_threads = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
  if (!openmp.parallel || !openmp.thread_num || !openmp.num_threads || !openmp.max_threads)
    return 0;
  moec_struct_init(&pool, sizeof pool);
  pool.num_threads = num_threads > 0 ? num_threads : openmp.max_threads();
  pool.user = (void *)(uintptr_t)pool.num_threads;
  pool.parallel_for = openmp_for;
  desc->pool = &pool;
  return 1;
}
%}

%inline %{
/* Functions at these addresses, as ctypes gives them, become the callbacks of a communicator. */
void set_callbacks(moec_comm_callbacks *callbacks, void *all_gather, void *all_to_all,
                   void *all_to_all_v, void *abort) {
  *(void **)&callbacks->all_gather = all_gather;
  *(void **)&callbacks->all_to_all = all_to_all;
  *(void **)&callbacks->all_to_all_v = all_to_all_v;
  *(void **)&callbacks->abort = abort;
}
/* Expert ranges are in the caller's memory until moec_ep_create has copied them. */
void set_expert_begin(moec_ep_desc *desc, void *expert_begin) {
  desc->expert_begin = expert_begin;
}
%}

%inline %{
static int leave_alone(void *nccl_comm) {
  (void)nccl_comm;
  return 0;
}
/* A status, of which moec_last_error knows what moec_comm_create refused alone, and the comm.
   is_lent: the one who lent it calls ncclCommAbort himself. */
int32_t comm_from_nccl(const moec_context *context, void *nccl_comm, int is_lent,
                       moec_comm **out) {
  moec_nccl_api api;
  if (!is_lent) return moec_comm_from_nccl(context, nccl_comm, NULL, out);
  if (moec_nccl_find(&api)) return MOEC_E_UNSUPPORTED;
  api.abort = leave_alone;
  return moec_comm_from_nccl(context, nccl_comm, &api, out);
}
%}
