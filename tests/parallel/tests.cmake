# What is lent to an operation that failed stays allocated, which is what leaks.
target_link_options(parallel_lent_buffers PRIVATE LINKER:--wrap=free LINKER:--wrap=munmap)
set_tests_properties(parallel.lent_buffers PROPERTIES ENVIRONMENT ASAN_OPTIONS=detect_leaks=0)

# Tests that need mpirun. The same programs also run alone (parallel.*), as a world of one or as the driver of mpirun.
if(NOT MEGALOOM_MPI)
  return()
endif()

set(mpi_run ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe --bind-to none
  --mca btl_vader_single_copy_mechanism none)
# MPI keeps memory until the process ends, so leaks are looked for in the thread tests.
set(mpi_environment ASAN_OPTIONS=detect_leaks=0 MEGALOOM_MPIRUN=${MPIEXEC_EXECUTABLE})

function(loom_mpi_test name ranks program)
  add_test(NAME mpi.${name} COMMAND ${mpi_run} -n ${ranks} $<TARGET_FILE:${program}> ${ARGN})
  set_tests_properties(mpi.${name} PROPERTIES TIMEOUT 120 LABELS mpi PROCESSORS 2 ENVIRONMENT "${mpi_environment}")
endfunction()

foreach(ranks 2 3 4)
  loom_mpi_test(collectives_${ranks} ${ranks} parallel_mpi_collectives)
endforeach()
loom_mpi_test(a_message_of_2500_bytes_in_chunks_of_1000_arrives 3 parallel_mpi_collectives 1000)
loom_mpi_test(trace 2 parallel_trace mpi)
loom_mpi_test(checkpoint_io 2 parallel_checkpoint_io ${CMAKE_BINARY_DIR}/mpi-checkpoint_io)
foreach(ranks 2 3 4)
  loom_mpi_test(context_${ranks} ${ranks} parallel_context mpi)
  loom_mpi_test(experts_${ranks} ${ranks} parallel_experts mpi)
  loom_mpi_test(biased_experts_${ranks} ${ranks} parallel_biased_experts mpi)
endforeach()
foreach(ranks 2 4)
  loom_mpi_test(shared_expert_${ranks} ${ranks} parallel_shared_expert mpi)
endforeach()
set_tests_properties(parallel.mpi_ends parallel.mpi_late parallel.mpi_collectives PROPERTIES LABELS "parallel;mpi"
  ENVIRONMENT "${mpi_environment}")
set_tests_properties(parallel.pipeline_steps parallel.exchanges_end PROPERTIES ENVIRONMENT MEGALOOM_MPIRUN=${MPIEXEC_EXECUTABLE})
