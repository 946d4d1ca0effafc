from megaopt_testing import parametrize_with_checks


@parametrize_with_checks("signum", lr=0.01, signum_beta=0.8)
def test_conformance(check):
    """It holds what every optimizer of megaopt holds."""
    check()
