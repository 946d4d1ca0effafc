from importlib.metadata import distribution

project = "megaopt"
author = "the megaopt developers"
copyright = author
version = release = distribution("megaopt-core").version

extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "megaopt"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# One page a module, written into docs/api/ from the docstrings at every build.
apidoc_modules = [
    {
        "path": f"../{path}",
        "destination": f"api/{path.rpartition('/')[2]}",
        "separate_modules": True,
        "module_first": True,
        "include_private": False,
    }
    for path in (
        "megaopt_core",
        "plugins/megaopt-adam/src/megaopt_adam",
        "plugins/megaopt-muon/src/megaopt_muon",
        "plugins/megaopt-tools/src/megaopt_tools",
    )
]

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# attrs fields are described under Attributes and Args; as members of their own they would be there twice.
napoleon_use_ivar = True
napoleon_include_special_with_doc = False
