// SPDX-License-Identifier: Apache-2.0
// The low-level Python layer: moec.h through SWIG, with these rules on top of SWIG's own.
//   status    a negative moec_status raises what set_error_factory's callable returns
//   handles   `moec_x **out` is returned; a pointer argument refuses None unless listed as NULLABLE
//   integers  anything with __index__, range-checked; addresses and streams are integers
//   structs   sized ones are made by moec_struct_init; unknown attributes raise
//   GIL       released in the calls of moec_lists.i, held in struct accessors, where a release
//             would cost a thread switch per field
%module(package="moec", threads="1") _raw

%begin %{
#define _GNU_SOURCE /* RTLD_DEFAULT */
%}
%{
#include <dlfcn.h>
#include <moec/moec.h>
#include <moec/nccl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
%}
%include <exception.i>

// ---------------------------------------------------------------- helpers of the typemaps
%{
/* (status, native_code, arg_index, name, site, message) -> exception */
static PyObject *error_factory;

static void raise_status(moec_status status) {
  moec_error_info info;
  moec_struct_init(&info, sizeof info);
  (void)moec_last_error(&info);
  PyObject *error = PyObject_CallFunction(error_factory, "iiisss", status, info.native_code,
                                          info.arg_index, moec_status_name(status), info.site,
                                          info.message);
  if (error) {
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
  }
}

static int as_signed(PyObject *object, long long low, long long high, long long *out) {
  PyObject *index = PyNumber_Index(object);
  if (!index) return -1;
  *out = PyLong_AsLongLong(index);
  Py_DECREF(index);
  if (*out == -1 && PyErr_Occurred()) return -1;
  if (*out >= low && *out <= high) return 0;
  PyErr_Format(PyExc_OverflowError, "%lld is outside [%lld, %lld]", *out, low, high);
  return -1;
}

static int as_unsigned(PyObject *object, unsigned long long high, unsigned long long *out) {
  PyObject *index = PyNumber_Index(object);
  if (!index) return -1;
  *out = PyLong_AsUnsignedLongLong(index);
  Py_DECREF(index);
  if (*out == (unsigned long long)-1 && PyErr_Occurred()) return -1;
  if (*out <= high) return 0;
  PyErr_Format(PyExc_OverflowError, "%llu is outside [0, %llu]", *out, high);
  return -1;
}
%}

// ---------------------------------------------------------------- scalars
%define SIGNED(TYPE, LOW, HIGH)
%typemap(in) TYPE (long long wide) {
  if (as_signed($input, LOW, HIGH, &wide)) SWIG_fail;
  $1 = (TYPE)wide;
}
%typemap(out) TYPE "$result = PyLong_FromLongLong((long long)$1);"
%enddef
%define UNSIGNED(TYPE, HIGH)
%typemap(in) TYPE (unsigned long long wide) {
  if (as_unsigned($input, HIGH, &wide)) SWIG_fail;
  $1 = (TYPE)wide;
}
%typemap(out) TYPE "$result = PyLong_FromUnsignedLongLong((unsigned long long)$1);"
%enddef
SIGNED(int32_t, INT32_MIN, INT32_MAX)
SIGNED(int64_t, INT64_MIN, INT64_MAX)
UNSIGNED(uint32_t, UINT32_MAX)
UNSIGNED(uint64_t, UINT64_MAX)
UNSIGNED(moec_dtype, UINT32_MAX)
%apply int32_t { moec_status status };

%typemap(in) float {
  const double wide = PyFloat_AsDouble($input);
  if (wide == -1.0 && PyErr_Occurred()) SWIG_fail;
  $1 = (float)wide;
}
%typemap(in) void * (unsigned long long address) {
  if (as_unsigned($input, UINTPTR_MAX, &address)) SWIG_fail;
  $1 = (void *)(uintptr_t)address;
}
%typemap(out) void * "$result = PyLong_FromVoidPtr($1);"
%apply void * { moec_stream };

%typemap(out) moec_status {
  if ($1 < 0) {
    raise_status($1);
    SWIG_fail;
  }
  $result = $1 ? PyLong_FromLong($1) : SWIG_Py_Void();
}

// Paths: str, bytes and what has __fspath__; a zero inside raises ValueError.
%typemap(in) const char *path (PyObject *encoded = NULL) {
  if (!PyUnicode_FSConverter($input, &encoded)) SWIG_fail;
  $1 = PyBytes_AsString(encoded);
}
%typemap(freearg) const char *path "Py_XDECREF(encoded$argnum);"

// ---------------------------------------------------------------- pointers
// OWNED: SWIG_POINTER_DISOWN where C takes the object over: a destructor its own. A struct that is
// pointed to by another stays Python's.
%define PROXY(NAME, OWNED, NULLS)
%typemap(in, noblock=1) SWIGTYPE *NAME (void *argp = 0, int res = 0) {
  res = SWIG_ConvertPtr($input, &argp, $descriptor, OWNED | NULLS);
  if (!SWIG_IsOK(res)) %argument_fail(res, "$type", $symname, $argnum);
  $1 = ($ltype)argp;
}
%enddef
PROXY(, 0, SWIG_POINTER_NO_NULL)
PROXY(self, $disown, SWIG_POINTER_NO_NULL)
PROXY(NULLABLE, 0, 0)
%apply SWIGTYPE *NULLABLE {
  const moec_buffer *memory, const moec_tensor *routing_weights, const moec_tensor *probs,
  const moec_tensor *token_mask, const moec_quantise_args *quantised
};

%define RETURNED_HANDLE(TYPE)
%typemap(in, numinputs=0) TYPE **out (TYPE *handle = NULL) "$1 = &handle;"
%typemap(argout) TYPE **out {
  $result = SWIG_Python_AppendOutput($result, SWIG_NewPointerObj(*$1, $*1_descriptor, 0), 1);
}
%enddef

%define RETURNED_INTEGER(TYPE, NAME)
%typemap(in, numinputs=0) TYPE *NAME (TYPE value = 0) "$1 = &value;"
%typemap(argout) TYPE *NAME {
  $result = SWIG_Python_AppendOutput($result, PyLong_FromLongLong((long long)*$1), 1);
}
%enddef
RETURNED_INTEGER(uint64_t, bytes)
RETURNED_INTEGER(uint64_t, need)
RETURNED_INTEGER(int64_t, max_rows)
RETURNED_INTEGER(int32_t, count)
RETURNED_INTEGER(moec_status, deferred)

%typemap(in, numinputs=0) int32_t totals[4] (int32_t value[4]) "$1 = value;"
%typemap(argout) int32_t totals[4] {
  PyObject *totals = Py_BuildValue("(iiii)", $1[0], $1[1], $1[2], $1[3]);
  $result = SWIG_Python_AppendOutput($result, totals, 1);
}

// Caller's memory: any writable (const: readable) buffer; None is NULL, 0 bytes: a size query.
%define BUFFER(POINTER, FLAGS)
%typemap(arginit) (POINTER, uint64_t bytes) "memset(&view$argnum, 0, sizeof view$argnum);"
%typemap(in) (POINTER, uint64_t bytes) (Py_buffer view) {
  if ($input != Py_None && PyObject_GetBuffer($input, &view, FLAGS)) SWIG_fail;
  $1 = view.buf;
  $2 = (uint64_t)view.len;
}
%typemap(freearg) (POINTER, uint64_t bytes) "PyBuffer_Release(&view$argnum);"
%enddef
BUFFER(void *buffer, PyBUF_WRITABLE)
BUFFER(char *buffer, PyBUF_WRITABLE)
BUFFER(const void *buffer, PyBUF_SIMPLE)

// ---------------------------------------------------------------- structs
%pythonnondynamic;
%ignore moec_struct_init;         // done by the constructors
%ignore moec_tensor_from_dlpack;  // tensor_from_capsule
%ignore moec_tensor_make;         // tensor_from_numpy
%ignore moec_set_log;             // set_log
// Callbacks into Python from a GEMM's inner loop or an allocator serve nobody.
%ignore moec_allocator;
%ignore moec_thread_pool;
%ignore moec_context_desc::allocator;
%ignore moec_context_desc::pool;

%define SIZED(TYPE)
%extend TYPE {
  TYPE() {
    TYPE *sized = malloc(sizeof(TYPE));
    moec_struct_init(sized, sized ? sizeof *sized : 0);
    return sized;
  }
}
%enddef

// ---------------------------------------------------------------- threads
%nothread;
%include "moec_lists.i"  // every handle, every sized struct, every call that may wait

%include <moec/moec.h>

%include <carrays.i>
%array_class(moec_tensor, tensor_array);
%array_class(moec_adapter, adapter_array);
%constant int adapter_bytes = sizeof(moec_adapter);
%constant int tensor_bytes = sizeof(moec_tensor);

%exception {
  $action
  if (PyErr_Occurred()) SWIG_fail;
}
%include "moec_inline.i"
%exception;

// ---------------------------------------------------------------- calls of call_args
%define CALL(NAME, HANDLE, ARGS)
%thread call_args::NAME;
%extend call_args {
  moec_status NAME(const HANDLE *handle, moec_stream stream) {
    return moec_##NAME(handle, (const ARGS *)$self, stream);
  }
}
%enddef
CALL(experts_forward, moec_experts, moec_experts_args)
CALL(experts_backward, moec_experts, moec_experts_grad_args)
CALL(layer_forward, moec_layer, moec_layer_args)
CALL(layer_backward, moec_layer, moec_layer_grad_args)

/* What call_args::plan_from_topk reads. */
struct topk_args {
  moec_buffer memory;
  moec_tensor expert_ids, routing_weights;
};
%constant int topk_bytes = sizeof(topk_args);

// Where the words stand that calls differ in.
%define AT(KIND, FIELD)
%constant int KIND##_##FIELD##_at = offsetof(KIND, FIELD);
%enddef
%define COMMON_AT(KIND)
AT(KIND, plan)
AT(KIND, adapters)
AT(KIND, weights)
AT(KIND, shared_weights)
%enddef
COMMON_AT(moec_experts_args)
COMMON_AT(moec_experts_grad_args)
AT(moec_experts_grad_args, d_adapters)
AT(moec_experts_grad_args, d_expert_weights)
AT(moec_experts_grad_args, d_shared_weights)
AT(moec_layer_args, adapters)
AT(moec_layer_args, rng_offset)
AT(moec_layer_args, shared_weights)
AT(moec_layer_args, weights)
AT(moec_layer_grad_args, d_adapters)
AT(moec_layer_grad_args, d_expert_weights)
AT(moec_layer_grad_args, d_shared_weights)
AT(moec_layer_grad_args, forward)
AT(moec_buffer, bytes)
AT(moec_buffer, ptr)
AT(moec_matrix, count)
AT(moec_matrix, per_expert)

%extend call_args {
  moec_status weights_bind(moec_weights *weights) {
    return moec_weights_bind(weights, (const moec_weight_set *)$self);
  }
}
%thread call_args::plan_from_topk;
%extend call_args {
  /* A plan in memory of the caller's. */
  moec_status plan_from_topk(const moec_context *context, const moec_plan_desc *desc,
                             moec_stream stream, moec_plan **out) {
    const topk_args *args = (const topk_args *)$self;
    const moec_status made = moec_plan_create(context, desc, &args->memory, out);
    if (made < 0) return made;
    const moec_status built =
        moec_plan_from_topk(*out, &args->expert_ids, &args->routing_weights, stream);
    if (built < 0) moec_plan_free(*out);
    return built;
  }
}
