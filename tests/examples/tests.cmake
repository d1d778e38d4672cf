# The examples are documentation that runs.
add_test(NAME example.own_loop COMMAND example_own_loop)
add_test(NAME example.own_loop_on_1_rank COMMAND example_own_loop 1)
add_test(NAME example.own_loop_on_4_ranks COMMAND example_own_loop 4)
add_test(NAME example.plain COMMAND megaloom_command train ${CMAKE_SOURCE_DIR}/examples/plain.yaml steps=5
  output=${CMAKE_BINARY_DIR}/example-plain)
set_tests_properties(example.own_loop example.own_loop_on_1_rank example.own_loop_on_4_ranks
  example.plain PROPERTIES TIMEOUT 60 LABELS example)
