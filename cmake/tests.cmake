# tests/unit/<room>_<what>.c links the room and what it may see; tests in other folders link the whole library.
# Every test has a time limit, so that a hang is a failure with a name.
if(NOT CMOCKA_FOUND)
  message(STATUS "cmocka not found: tests are not built")
  return()
endif()

function(loom_test name source library)
  add_executable(${name} ${source})
  target_include_directories(${name} PRIVATE tests)
  target_compile_definitions(${name} PRIVATE MEGALOOM_TESTS="${CMAKE_SOURCE_DIR}/tests"
    MEGALOOM_BUILD="${CMAKE_BINARY_DIR}")
  target_link_libraries(${name} PRIVATE ${library} PkgConfig::CMOCKA)
endfunction()

file(GLOB unit_sources CONFIGURE_DEPENDS tests/unit/*.c)
foreach(source IN LISTS unit_sources)
  get_filename_component(name ${source} NAME_WE)
  string(REGEX MATCH "^[a-z]+" room ${name})
  loom_test(unit_${name} ${source} room_${room})
  add_test(NAME unit.${name} COMMAND unit_${name})
  set_tests_properties(unit.${name} PROPERTIES TIMEOUT 120 LABELS "unit;${room}")
endforeach()

file(GLOB golden_sources CONFIGURE_DEPENDS tests/golden/*.c)
foreach(source IN LISTS golden_sources)
  get_filename_component(name ${source} NAME_WE)
  loom_test(golden_${name} ${source} megaloom)
  add_test(NAME golden.${name} COMMAND golden_${name})
  set_tests_properties(golden.${name} PROPERTIES TIMEOUT 300 LABELS golden)
endforeach()

file(GLOB parallel_sources CONFIGURE_DEPENDS tests/parallel/*.c)
foreach(source IN LISTS parallel_sources)
  get_filename_component(name ${source} NAME_WE)
  loom_test(parallel_${name} ${source} megaloom)
  add_test(NAME parallel.${name} COMMAND parallel_${name})
  set_tests_properties(parallel.${name} PROPERTIES TIMEOUT 300 LABELS parallel)
endforeach()

file(GLOB test_lists CONFIGURE_DEPENDS tests/*/tests.cmake)
foreach(list IN LISTS test_lists)
  include(${list})
endforeach()
