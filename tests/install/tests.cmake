# Each tests/install/<name>.case becomes the test install.<name>: what a user does with an installed tree. Their programs
# are built by the plain compiler, which a library with sanitizers inside does not fit.
if(MEGALOOM_SANITIZE OR MEGALOOM_FUZZ)
  return()
endif()
file(GLOB install_cases CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/install/*.case)
foreach(case IN LISTS install_cases)
  get_filename_component(name ${case} NAME_WE)
  add_test(NAME install.${name} COMMAND ${CMAKE_SOURCE_DIR}/tests/cli/run-case ${case} ${CMAKE_BINARY_DIR})
  set_tests_properties(install.${name} PROPERTIES TIMEOUT 180 LABELS install)
endforeach()
