# The library as others link it: the objects of all rooms, compiled once, as an archive and as a shared library. What is
# not marked LOOM_API is hidden (-fvisibility=hidden), so that of the shared library's symbols only loom_ are seen.
#
# static_libraries is what both need from outside, collected from the rooms: names that mean the same in the project of a
# user. static_flags says the same to pkg-config. These are flags, not Requires.private: that would demand the development
# packages of all these libraries for every compilation, and, to link with the archive, also the libraries that an archive
# of each of them would need.
get_property(kernel_targets GLOBAL PROPERTY loom_kernel_targets)
set(objects "")
set(static_libraries "")
foreach(target IN LISTS rooms kernel_targets)
  if(TARGET room_${target})
    set(target room_${target})
  endif()
  list(APPEND objects $<TARGET_OBJECTS:${target}>)
  get_target_property(libraries ${target} LINK_LIBRARIES)
  foreach(library IN LISTS libraries)
    if(library STREQUAL "MPI::MPI_C")
      list(APPEND static_libraries ${MPI_C_LIBRARIES})
    elseif(library AND NOT library MATCHES "^room_")
      list(APPEND static_libraries ${library})
    endif()
  endforeach()
endforeach()
list(REMOVE_DUPLICATES static_libraries)

# PkgConfig::NAME and the module that pkg_check_modules was asked for.
set(module_YAML yaml-0.1)
set(module_JANSSON jansson)
set(module_HWLOC hwloc)
set(module_OPENBLAS openblas)
set(static_lookups "")
set(static_flags "")
foreach(library IN LISTS static_libraries)
  if(library MATCHES "^PkgConfig::(.*)$")
    set(name ${CMAKE_MATCH_1})
    if(NOT module_${name})
      message(FATAL_ERROR "cmake/library.cmake does not know the module of ${library}: "
        "add set(module_${name} …)")
    endif()
    list(APPEND static_flags ${${name}_LDFLAGS})
    string(APPEND static_lookups "  megaloom_look_up(${name} ${module_${name}})\n")
  elseif(library STREQUAL "Threads::Threads")
    list(APPEND static_flags -lpthread)
  elseif(IS_ABSOLUTE "${library}")
    get_filename_component(folder ${library} DIRECTORY)
    get_filename_component(name ${library} NAME_WE)
    string(REGEX REPLACE "^lib" "-l" name ${name})
    if(folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
      list(APPEND static_flags ${name})
    else()
      list(APPEND static_flags ${library})
    endif()
  else()
    list(APPEND static_flags -l${library})
  endif()
endforeach()

foreach(folder IN LISTS CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
  list(REMOVE_ITEM static_flags -L${folder})
endforeach()

add_library(megaloom_static STATIC ${objects})
add_library(megaloom_shared SHARED ${objects})
foreach(library megaloom_static megaloom_shared)
  target_link_libraries(${library} PRIVATE ${static_libraries})
  target_include_directories(${library} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  set_target_properties(${library} PROPERTIES OUTPUT_NAME megaloom LINKER_LANGUAGE C)
endforeach()
set_target_properties(megaloom_static PROPERTIES EXPORT_NAME static)
# Until 1.0 the number of the binary interface stays 0 and promises nothing across minor versions (CHANGELOG.md).
set_target_properties(megaloom_shared PROPERTIES EXPORT_NAME megaloom VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR} INSTALL_RPATH_USE_LINK_PATH ON)
target_link_options(megaloom_shared PRIVATE -Wl,--exclude-libs,ALL)
# Sanitizers leave symbols open that the program brings.
if(NOT MEGALOOM_SANITIZE AND NOT MEGALOOM_FUZZ)
  target_link_options(megaloom_shared PRIVATE -Wl,--no-undefined)
endif()
