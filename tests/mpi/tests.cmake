# SPDX-License-Identifier: Apache-2.0
# moec/mpi.h with 2 and 4 processes, more than there may be cores, also as root.
find_package(MPI COMPONENTS C)
if(MPI_C_FOUND)
  add_executable(ep_mpi_test mpi/ep_mpi_test.cpp)
  target_link_libraries(ep_mpi_test PRIVATE moec_ep_support moec MPI::MPI_C Threads::Threads
    GTest::gtest)
  target_compile_definitions(ep_mpi_test PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  foreach(count 2 4)
    add_test(NAME mpi/ep_mpi_test@${count}
      COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${count} $<TARGET_FILE:ep_mpi_test>)
    set(environment GTEST_OUTPUT=xml:${MOEC_RESULTS}/mpi/ep_mpi_test@${count}.xml
      OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
      OMPI_MCA_btl_vader_single_copy_mechanism=none)
    set_tests_properties(mpi/ep_mpi_test@${count} PROPERTIES ENVIRONMENT "${environment}"
      LABELS mpi PROCESSORS 2)
  endforeach()
endif()
