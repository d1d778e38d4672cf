# The golden model tests once more on MPI ranks: the same programs under mpirun. golden.train_mpi* compare bit for bit with
# what golden.train wrote into the build tree, so ctest runs that first.
if(NOT MEGALOOM_MPI)
  return()
endif()

set_tests_properties(golden.train PROPERTIES FIXTURES_SETUP golden_train_numbers)
foreach(name export generate hf train mcore moe_biases)
  set(worlds 2 4)
  if(name STREQUAL "train")
    list(APPEND worlds 8)
  endif()
  foreach(ranks IN LISTS worlds)
    add_test(NAME golden.${name}_mpi${ranks} COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe
      --bind-to none --mca btl_vader_single_copy_mechanism none -n ${ranks} $<TARGET_FILE:golden_${name}>)
    # MPI keeps memory until the process ends, so leaks are looked for in the thread runs.
    set_tests_properties(golden.${name}_mpi${ranks} PROPERTIES TIMEOUT 300 LABELS "golden;mpi" PROCESSORS 2
      ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;ASAN_OPTIONS=detect_leaks=0")
  endforeach()
endforeach()
set_tests_properties(golden.train_mpi2 golden.train_mpi4 golden.train_mpi8 PROPERTIES FIXTURES_REQUIRED golden_train_numbers)
